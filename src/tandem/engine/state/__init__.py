"""State that sequences keep between steps."""
