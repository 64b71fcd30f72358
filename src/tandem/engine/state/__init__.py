"""What sequences keep between steps."""
