"""What the keys of each tool mean in a recipe, one module a tool."""
