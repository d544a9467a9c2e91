"""The HTTP server: OpenAI's and Anthropic's endpoints, a chat page, metrics and an OpenAPI document."""
