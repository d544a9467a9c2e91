"""The torch backend, which runs models on CPUs and CUDA devices."""
