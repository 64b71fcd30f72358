"""Gated delta nets (Qwen3-Next)."""
