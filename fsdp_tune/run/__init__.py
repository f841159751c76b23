"""The run directory: paths, manifest, checkpoint metadata, and the files that launcher, ranks and merge
exchange."""
