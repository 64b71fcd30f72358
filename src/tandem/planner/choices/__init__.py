"""Choices of a plan and their reasons: one file for each choice."""
