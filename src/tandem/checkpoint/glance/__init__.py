"""What a model directory is, at a glance: before the header of any weight is read."""
