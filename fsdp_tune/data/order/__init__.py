"""Arrange rows in micro-batches, in an order that depends on seed and epoch alone."""
