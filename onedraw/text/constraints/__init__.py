"""Constraints on sampled tokens: structured output (JSON schema, regular expression, choice, grammar) and thinking budget."""
