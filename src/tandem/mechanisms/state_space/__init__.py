"""State spaces (Mamba 2)."""
