"""Everything between text and tokens: tokenizer, chat template, detokenizer, stop strings, reasoning, tool calls, grammars."""
