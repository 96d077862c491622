"""The commands of `capture`, one a module, and what they share towards a terminal."""
