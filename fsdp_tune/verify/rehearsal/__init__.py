"""A recipe rehearsed on small ranks: the model shrunk, the code path that of the real run."""
