"""Experts in CPU memory, streamed to the GPU for one step, because it has many rows."""
