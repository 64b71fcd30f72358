"""Writes a checkpoint anew with quantised weights: layer by layer, in bounded memory, resumable."""

from tandem.convert.converter import Conversion, convert
from tandem.convert.methods import METHODS

__all__ = ["METHODS", "Conversion", "convert"]
