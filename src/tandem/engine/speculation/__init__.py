"""Guesses of what comes next: who makes them, how many are worth a row, and what becomes of them."""
