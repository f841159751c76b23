"""Attention, loss, compile and fp8 kernels, and which of them a recipe selects."""
