"""Build the recipe's model: on meta, sharded, with weights read as slices."""
