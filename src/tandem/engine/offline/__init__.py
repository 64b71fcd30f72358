"""What `tandem.LLM` is made of: what callers give it, its requests, and what it gives back."""
