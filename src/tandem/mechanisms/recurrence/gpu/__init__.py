"""Memories of constant size on a GPU."""
