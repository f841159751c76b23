"""Examples to rows of sets."""
