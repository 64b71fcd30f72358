"""A model directory at a glance: its kind and formats, before the header of any weight is read."""
