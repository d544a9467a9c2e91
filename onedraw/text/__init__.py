"""Characters: tokenizer, chat template, detokenizer, stop strings, channels."""
