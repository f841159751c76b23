"""Make a recipe from the files of another tool, and account for each of their keys. Pure and torch-free."""
