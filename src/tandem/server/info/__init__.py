"""What clients, routers and people ask about the server itself, beyond SGLang's control routes."""
