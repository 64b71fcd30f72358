"""Several ranks: which part of a model each of them holds."""
