"""A step of the engine: its value, and the path that it takes."""
