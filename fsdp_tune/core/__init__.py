"""Shared foundations: problems, units, atomic writes, child processes, the hub, devices."""
