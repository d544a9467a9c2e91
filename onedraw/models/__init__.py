"""Model families as data: specifications, configuration readers and weight names. No torch, no jax."""
