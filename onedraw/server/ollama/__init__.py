"""Ollama's API: request bodies, and the replies in its shape."""
