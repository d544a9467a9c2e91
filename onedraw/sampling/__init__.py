"""The sampling rule as pure functions in numpy: the reference for every fast sampler."""
