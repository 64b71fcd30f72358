"""Measurements behind `kt bench`."""
