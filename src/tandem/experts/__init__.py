"""Decides where every expert lives, holds it there, runs a layer's experts."""

from tandem.experts.cpu_experts import CpuExperts, ExpertStore, RoutedExperts, Ticket
from tandem.experts.feed import ExpertFeed, ExpertMatrices, LayerFeed

__all__ = ["CpuExperts", "ExpertFeed", "ExpertMatrices", "ExpertStore", "LayerFeed", "RoutedExperts", "Ticket"]
