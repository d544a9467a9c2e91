"""The law of choosing: pure functions in numpy, the judge of every fast sampler."""
