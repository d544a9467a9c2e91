"""Who guesses, and how much."""
