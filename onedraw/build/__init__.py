"""Builds a running model from Settings: checkpoint, memory plan, devices, drafters, backend, engine."""
