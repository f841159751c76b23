"""What surrounds a run on a cluster: the job of an engine, the mirror of its checkpoints, and what `doctor`
checks of machines."""
