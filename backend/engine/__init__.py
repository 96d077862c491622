"""The decoding loop: scheduler, sequences, caches, the speculative step, sampling."""
