"""Encode examples as token ids and a mask of trained tokens."""
