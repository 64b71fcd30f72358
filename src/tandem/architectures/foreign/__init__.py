"""Models of other families: Transformers' own modules, looked at before a weight is read.

`transformers` is imported here and in `models/foreign/` only, and only for a family that Tandem has no code for.
"""

from __future__ import annotations

from tandem.architectures.foreign.config import foreign_config
from tandem.architectures.foreign.registry import installed_version

__all__ = ["foreign_config", "installed_version"]
