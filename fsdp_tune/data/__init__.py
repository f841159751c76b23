"""Turn rows of files into training batches: read, format, tokenise, pack, store, order, collate. Uses numpy,
not torch."""
