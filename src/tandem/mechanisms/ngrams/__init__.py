"""N-grams of tokens, out of a table that is read by row."""
