"""From YAML and `--set` to a checked recipe, with the line of every value."""
