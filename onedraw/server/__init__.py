"""HTTP in, pieces out."""
