"""References for a run: a plain loop on one device, and torch's own reader of checkpoints. They import
nothing from the worker."""
