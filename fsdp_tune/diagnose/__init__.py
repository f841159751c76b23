"""Describe this machine, match known problems with it, explain out-of-memory errors, and draw pages about runs."""
