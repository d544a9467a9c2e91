"""The OpenXLA backend, through jax: the same protocol, sampling rule and contract as the torch backend. Only this package
imports jax."""
