"""Tables that are read by row: where their rows lie in files, and how they are read."""
