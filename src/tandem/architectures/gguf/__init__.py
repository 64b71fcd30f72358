"""Families whose GGUF files have more than other names: tensors cut, turned, or in other numbers."""
