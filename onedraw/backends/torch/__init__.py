"""CPU and CUDA through torch."""
