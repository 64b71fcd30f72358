"""Routed experts inside other engines: these compute attention, routers and all else, and ask for the experts' sums."""

from tandem.backends.host import Host
from tandem.backends.model_experts import LayerExperts, ModelExperts
from tandem.backends.options import experts_config

__all__ = ["Host", "LayerExperts", "ModelExperts", "experts_config"]
