"""Structured output: grammars that answers match, compiled in a process of their own."""
