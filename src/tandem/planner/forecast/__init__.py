"""Memory and speed of a plan before anything is loaded: for this machine and for others."""
