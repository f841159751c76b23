"""Checks of sources and of the output."""
