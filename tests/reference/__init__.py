"""Slow, independent judges."""
