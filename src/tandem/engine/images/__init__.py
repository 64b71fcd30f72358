"""Pixels of images: decoded and resized in a process of their own, as a model's processor wants them."""
