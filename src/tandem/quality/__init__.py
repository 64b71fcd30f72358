"""Measures what a format or another checkpoint does to a model's answers, with one layer in memory at a time."""
