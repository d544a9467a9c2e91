"""Speculative decoding on the host: proposers of drafts, draft trees, and how many drafts a row carries."""
