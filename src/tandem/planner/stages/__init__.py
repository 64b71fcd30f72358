"""Layers over several GPUs: which GPU has which layers."""
