"""Processes of ours: how they learn of each other's end, what they send each other, and what stays out of garbage."""
