"""Decoding with guesses where answers, routing and the guesses that are right are said in advance."""
