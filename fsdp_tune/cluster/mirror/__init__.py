"""`checkpoint.mirror`: a second copy of a run's checkpoints and models below a URL."""
