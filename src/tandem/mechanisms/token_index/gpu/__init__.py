"""Indexers on a GPU: scores of all tokens before a row, and the best of them, in order, with static shapes."""
