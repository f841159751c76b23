"""The schema of a recipe."""
