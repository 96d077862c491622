"""One module per drafter, one small protocol."""
