"""The state of a model between steps: KV pages, recurrent state, snapshots."""
