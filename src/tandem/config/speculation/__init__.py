"""What is asked of speculative decoding."""
