"""The real step of a recipe, run on a device that computes nothing, and what it would have allocated and computed. Imports torch."""
