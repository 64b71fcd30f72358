"""Safetensors files as mapped memory: which tensor lies where, and which of its pages are wanted."""
