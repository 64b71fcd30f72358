"""Attention over keys that are values, too, and over pools of them (DeepSeek-V4)."""
