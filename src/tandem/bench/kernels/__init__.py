"""`kt bench kernels`: what the expert kernels reach, and which of them runs."""
