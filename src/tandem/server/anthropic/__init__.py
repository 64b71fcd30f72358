"""Anthropic's dialect: POST /v1/messages and /v1/messages/count_tokens. https://docs.anthropic.com/en/api/messages"""
