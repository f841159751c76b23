"""Optimizers and the accumulation of gradients."""
