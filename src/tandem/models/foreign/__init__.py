"""Families that run through Transformers' modules, with Tandem's experts, attention and matrices in them."""

from __future__ import annotations

from tandem.models.foreign.model import ForeignModel, foreign_model

__all__ = ["ForeignModel", "foreign_model"]
