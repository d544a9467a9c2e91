"""Replicas: one engine client over several engines, which picks an engine for each request and moves requests when one dies."""
