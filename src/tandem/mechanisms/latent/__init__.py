"""Multi-head latent attention (DeepSeek-V2)."""
