"""Families whose layers differ: some see all tokens, others a window of them."""
