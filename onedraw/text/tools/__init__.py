"""Tool calls: prompt, grammar and parser of each dialect."""
