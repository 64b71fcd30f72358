"""OpenAI's chat dialect: its bodies, what they mean, and its answers."""
