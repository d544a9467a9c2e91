"""The running model, which the server, the command line and the Python API share: options in, text, usage and tool calls out."""
