"""From a plan to a loaded engine."""
