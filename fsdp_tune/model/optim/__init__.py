"""Optimizers and gradient accumulation."""
