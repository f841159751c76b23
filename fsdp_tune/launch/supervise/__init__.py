"""From the start of a launch to its verdict: watch ranks, pass on signals, restart."""
