"""Run a recipe at small scale and compare it with a plain loop."""
