"""Rehearse a recipe with a scaled-down model on the code path of a real run, and compare it with a plain
loop."""
