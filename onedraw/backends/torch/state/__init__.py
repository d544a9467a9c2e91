"""What a model keeps between steps: KV pages, recurrent state, snapshots."""
