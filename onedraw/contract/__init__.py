"""Prove, record and replay: the contract as tools for users."""
