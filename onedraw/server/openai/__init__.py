"""OpenAI's chat, completions and Responses APIs."""
