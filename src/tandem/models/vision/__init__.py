"""Towers: from pixels to features, in torch and `Ops`."""
