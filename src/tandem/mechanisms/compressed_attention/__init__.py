"""Compressed attention (DeepSeek-V4): over keys that are values, too, and over entries that stand for many of them."""
