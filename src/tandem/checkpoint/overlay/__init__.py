"""Checkpoints of which a part is somewhere else."""
