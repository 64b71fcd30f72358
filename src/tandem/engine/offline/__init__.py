"""Parts of `tandem.LLM`: its input, its requests, and its results."""
