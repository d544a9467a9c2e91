"""Text: tokenizer, chat template, detokenizer, stop strings, reasoning, tool calls, structured output."""
