"""Compare layouts of one training run."""
