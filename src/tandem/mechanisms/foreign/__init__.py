"""Layers whose mixing is done by modules that are not ours."""
