"""Ollama's dialect: /api/chat, /api/generate and what its clients ask first. https://docs.ollama.com/api"""
