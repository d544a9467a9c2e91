"""Helpers shared by tests of several packages: tiny models, backends, counters."""
