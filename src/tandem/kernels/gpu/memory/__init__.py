"""Between memory of the host and that of the GPU, by kernels."""
