"""Packed weights: in memory, in files."""
