"""Gated convolutions over a few tokens (LFM2)."""
