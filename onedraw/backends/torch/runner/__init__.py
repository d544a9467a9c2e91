"""One step of the model: inputs, pipeline stages, CUDA graphs."""
