"""Codes on tensor cores: CUDA kernels for few rows, and how they take packed codes."""
