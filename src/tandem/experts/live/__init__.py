"""Placement that follows the traffic."""
