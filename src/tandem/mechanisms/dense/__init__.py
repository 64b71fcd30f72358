"""Feed-forwards that every token uses."""
