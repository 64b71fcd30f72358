"""Kernels in Triton, imported only where a GPU is used; the oracle of each is in `kernels/reference.py`."""
