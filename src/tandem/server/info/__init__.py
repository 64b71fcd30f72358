"""Routes about the server itself, for clients, routers and people, beyond SGLang's control routes."""
