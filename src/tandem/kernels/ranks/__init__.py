"""Where ranks meet."""
