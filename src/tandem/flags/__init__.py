"""Flags: each of them once, other engines' spellings, and settings of the environment."""
