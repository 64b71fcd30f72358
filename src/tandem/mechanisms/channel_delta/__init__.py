"""Delta nets each of whose channels decays by itself (Kimi delta attention)."""
