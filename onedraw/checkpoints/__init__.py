"""Bytes on disk to named tensors: one reader per format, mapped, streamed layer by layer."""
