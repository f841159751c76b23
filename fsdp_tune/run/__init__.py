"""The run directory: paths, manifest, and the files that launcher, ranks and merge exchange."""
