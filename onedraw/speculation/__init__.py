"""Speculative decoding on the host: proposers that draft tokens, draft trees, and the choice of how many drafts a row carries."""
