"""Benchmark programs: each compares with a peer in one run, as a ratio, and with the physical floor."""
