"""Sampling on the device in plain torch."""
