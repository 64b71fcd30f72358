"""Attention of long chunks in cuDNN: keys and values are gathered from pages, a piece at a time, and pieces added."""
