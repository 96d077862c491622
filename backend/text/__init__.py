"""Text in, token ids out, and back: template, tokenizer, detokenizer, stop strings, reasoning."""
