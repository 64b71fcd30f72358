"""Indexers: which tokens a row looks at (DeepSeek-V3.2, GLM-5.3-Flash)."""
