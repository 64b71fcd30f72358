"""Latent attention on a GPU: absorbed queries over latent pages for decoding, keys and values of each head for prompts.
"""
