"""Host-side accounting of KV cache memory: pages, prefix cache, checkpoint slots, disk snapshots, and the allocator."""
