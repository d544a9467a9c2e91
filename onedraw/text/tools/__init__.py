"""Tool calls: how tools enter the prompt, the grammar of constrained calls, and the parser of each call syntax."""
