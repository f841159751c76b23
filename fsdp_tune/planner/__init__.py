"""Predict memory, time and cost of a recipe from a traced step, and rank recipes. Pure: only `planner.trace`
imports torch."""
