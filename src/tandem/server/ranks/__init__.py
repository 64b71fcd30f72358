"""Processes of ranks beside the engine's own, which is the first."""
