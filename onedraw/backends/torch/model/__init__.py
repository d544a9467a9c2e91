"""The model's layers as data and weights on a device."""
