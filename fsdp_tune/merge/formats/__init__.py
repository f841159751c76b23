"""Readers of checkpoint files that run no code."""
