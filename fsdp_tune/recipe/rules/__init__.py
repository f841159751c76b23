"""Rules about the keys of a recipe."""
