"""Build the recipe's model: on the meta device, sharded, with weights read as slices."""
