"""Coordination of several machines through the run directory."""
