"""Several streams in place of one residual (hyper-connections)."""
