"""Indexers whose blocks of tokens have the mean of their keys."""
