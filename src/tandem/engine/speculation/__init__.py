"""Draft tokens: who makes them, how many are worth a row, and what becomes of them."""
