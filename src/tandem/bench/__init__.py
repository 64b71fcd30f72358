"""What `kt bench` measures."""
