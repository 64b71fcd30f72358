"""Attention over keys that are values, too, and over entries that stand for many: what lies between its matrices."""
