"""Routers: logits become experts and weights."""
