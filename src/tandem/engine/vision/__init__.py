"""Images of requests, and the encoder that makes their features between steps."""
