packed_nccl_broadcast_producer = None
