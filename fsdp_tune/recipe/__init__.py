"""The recipe: one YAML file that describes a whole run. Pure and torch-free."""
