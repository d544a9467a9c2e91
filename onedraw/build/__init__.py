"""Settings to a running model."""
