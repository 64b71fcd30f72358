"""Experts of steps with many rows: packed panels are unpacked into scratch, and grouped products read that."""
