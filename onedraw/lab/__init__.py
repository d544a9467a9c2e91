"""Tools for benchmarks that serving does not need: the transformers peer, recorded drafts, lower bounds of step times."""
