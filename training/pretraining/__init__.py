"""How the bundled model is made: corpus, tokenizer, trunk and MTP head from random weights."""
