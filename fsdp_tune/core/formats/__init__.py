"""Formats of model files that several rooms read: names, fields and headers, without tensors."""
