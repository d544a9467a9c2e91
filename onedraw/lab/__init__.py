"""What benchmarks need and serving does not: peers, recorded drafts, floors."""
