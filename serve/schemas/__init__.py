"""Request and response bodies, one module per endpoint family."""
