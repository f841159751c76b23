"""Supervise a launch: watch ranks, forward signals, judge the end, restart."""
