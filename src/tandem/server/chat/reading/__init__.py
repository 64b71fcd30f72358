"""Reads one answer as it comes. Every reader is a generator: it yields where it needs more text, and goes on there."""
