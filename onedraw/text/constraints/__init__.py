"""Structured output: JSON schema, regular expression, choice, grammar; and the thinking budget."""
