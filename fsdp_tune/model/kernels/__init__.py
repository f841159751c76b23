"""Attention, loss, compile and fp8 kernels, and their selection by the recipe."""
