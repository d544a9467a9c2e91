"""The OpenXLA backend: the same engine, law and contract, with layers interpreted in jax. The only place that imports it."""
