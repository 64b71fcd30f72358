"""Products whose last bits do not depend on how many rows there are (`--enable-deterministic-inference`)."""
