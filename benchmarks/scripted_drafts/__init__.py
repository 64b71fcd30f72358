"""Decoding with draft tokens where answers, routing and accepted draft tokens are said in advance."""
