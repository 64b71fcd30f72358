"""Routed experts, and what stands beside them."""
