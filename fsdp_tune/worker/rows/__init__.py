"""The rows of a run on this rank: prepared or streamed, as micro-batches."""
