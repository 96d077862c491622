"""npz in, drafter checkpoint out."""
