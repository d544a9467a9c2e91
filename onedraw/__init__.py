"""Onedraw: an LLM server in which speed never changes the answer."""

__version__ = "0.1.0"
