"""Compare the live run with the recipe: structure, dtypes, isolation, and the invariants of every step."""
