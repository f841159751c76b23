"""Compare layouts of one training."""
