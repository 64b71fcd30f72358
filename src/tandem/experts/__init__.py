"""Decides where every expert lives, holds it there, runs a layer's experts."""

from tandem.experts.cpu_experts import CpuExperts, ExpertMatrices, Experts, ExpertStore, Ticket

__all__ = ["CpuExperts", "ExpertMatrices", "ExpertStore", "Experts", "Ticket"]
