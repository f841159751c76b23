"""What everything may use: problems, units, atomic writes, child processes, the hub, devices."""
