"""Rows from files to training batches: read, format, tokenise, pack, store, order, collate. Pure: numpy, no torch."""
