"""Batches: files of requests that run in the background, and files of their replies."""
