"""Slow, independent reference implementations, and their tests."""
