"""`kt bench serve --long-prompt`: how long readers of an answer wait beside somebody else's long prompts."""
