"""Read YAML and `--set` into a checked recipe, with the line of every value."""
