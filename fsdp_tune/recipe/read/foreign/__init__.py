"""Turn the configuration of another trainer into a recipe: `importing.py` has the way from a file to a recipe and its account."""
