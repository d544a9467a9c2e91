"""Structured output: JSON schema, regular expression, choice, grammar, thinking budget."""
