"""What a run is held against: a plain loop on one device, and torch's own reading of a checkpoint. Nothing of the worker is in it."""
