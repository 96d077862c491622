"""Numerical primitives, each a torch reference with the row-invariance it promises."""
