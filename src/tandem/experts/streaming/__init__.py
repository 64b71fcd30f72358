"""Experts in CPU memory that travel to the GPU for one step, because it has many rows."""
