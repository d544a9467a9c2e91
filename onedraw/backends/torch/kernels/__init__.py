"""Kernels of our own, each with a slow twin under `layers/` that has the same meaning."""
