"""Training of drafters as users run it: data, the run and its saved state, and what a drafter gains in the real engine."""
