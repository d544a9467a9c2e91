"""Devices behind one protocol."""
