"""Matrix products with quantized weights on a GPU."""
