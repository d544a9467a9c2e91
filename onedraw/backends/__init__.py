"""Backends, which compute steps: one protocol for torch, OpenXLA and a fake one without a model."""
