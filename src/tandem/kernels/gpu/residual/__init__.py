"""What stands around a block on a GPU: the norm of one residual, and streams that mix."""
