"""Heartbeat, metrics, profiles and reports of a rank."""
