"""Decides where every expert lives, holds it there, runs a layer's experts."""

from tandem.experts.cpu_experts import CpuExperts, Experts, ExpertStore, Ticket
from tandem.experts.look_ahead import ExpertMatrices, LookAhead

__all__ = ["CpuExperts", "ExpertMatrices", "ExpertStore", "Experts", "LookAhead", "Ticket"]
