"""Residual streams that never mix."""
