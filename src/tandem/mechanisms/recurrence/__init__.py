"""Memories of constant size and convolutions over few tokens: what several recurrences share. No mechanism itself."""
