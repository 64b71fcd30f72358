"""What layers compute whose memory of a sequence has a constant size, on every machine."""
