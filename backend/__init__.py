"""Tokens: the model, the engine, the drafters and the text around them. Serves no HTTP."""
