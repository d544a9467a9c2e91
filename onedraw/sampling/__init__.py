"""The sampling rule as pure functions in numpy. Every fast sampler is tested against it."""
