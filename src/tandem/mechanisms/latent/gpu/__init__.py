"""Latent attention on a GPU: absorbed queries over latents for decoding, each head's keys and values for prompts."""
