"""The live page: static files."""
