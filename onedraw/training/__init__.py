"""Training of drafters as users run it: data, the run with its saved state, and tokens per step of a drafter in the real
engine."""
