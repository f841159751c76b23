"""Rows to micro-batches, in an order that depends on seed and epoch alone."""
