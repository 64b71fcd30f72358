"""Layers over several GPUs, in one process: a stage is a run of layers on one of them."""
