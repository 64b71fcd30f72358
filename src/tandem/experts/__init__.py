"""Decides where every expert lives, holds it there, runs a layer's experts."""

from tandem.experts.cpu_experts import CpuExperts, ExpertMatrices, Ticket
from tandem.experts.routing import with_shared

__all__ = ["CpuExperts", "ExpertMatrices", "Ticket", "with_shared"]
