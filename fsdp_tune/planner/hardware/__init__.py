"""GPUs and what they reach."""
