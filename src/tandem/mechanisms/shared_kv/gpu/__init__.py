"""Shared keys on a GPU where every sequence has one row: five short kernels in place of torch's sixty."""
