"""Describe this machine, match known problems with it, and explain out-of-memory errors."""
