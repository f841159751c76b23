"""Predict memory and time of a traced step."""
