"""Sharded checkpoint → ordinary model directory, as a stream of bytes: no torch, no process group, constant
memory."""
