"""Ranks beside the first: it schedules and samples, they compute the same rows."""
