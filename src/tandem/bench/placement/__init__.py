"""How strategies of placement compare."""
