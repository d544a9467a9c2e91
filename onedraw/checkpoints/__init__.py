"""Checkpoint readers: safetensors and GGUF files, dequantization, download, and random weights."""
