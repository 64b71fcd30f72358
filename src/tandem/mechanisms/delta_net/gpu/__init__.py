"""Gated delta nets on a GPU: a fused step for rows that decode, chunks for prompts."""
