"""The Qwen3.5 trunk, the MTP block, weight loading and fingerprints."""
