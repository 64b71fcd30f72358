"""Where ranks on several GPUs of one host meet."""
