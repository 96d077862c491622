"""Text in, token ids out, and back: template, tokenizer, detokenizer, stop strings, grammars, reasoning, tool calls."""
