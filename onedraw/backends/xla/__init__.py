"""The OpenXLA backend, which compiles models with jax. It has the same protocol, sampling rule and contract as the torch backend.
Only this package imports jax."""
