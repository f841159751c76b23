"""Run the real step of a recipe on a device that computes nothing, and record its allocations and operations.
Imports torch."""
