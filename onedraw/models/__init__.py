"""What a model is: data only, no torch, no jax."""
