"""The running model as every interface uses it."""
