"""Kinds of layers that take a file of their own; `config/layers.py` has the others."""
