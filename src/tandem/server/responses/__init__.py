"""OpenAI's Responses dialect: /v1/responses. https://platform.openai.com/docs/api-reference/responses"""
