"""Ray Serve: `tandem.ray.app(models=[…])` serves replicas of models from the hosts of a Ray cluster, behind one
address. It needs the extra `ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.ray.application import app, build

__all__ = ["app", "build"]


def __getattr__(name: str) -> Any:
    """On first use: what chooses a replica needs no Ray."""
    if name in __all__:
        from tandem.ray import application

        return getattr(application, name)
    raise AttributeError(f"module 'tandem.ray' has no attribute {name!r}")
