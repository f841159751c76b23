"""The accelerate command, its environment, and the run directory that the ranks read."""
