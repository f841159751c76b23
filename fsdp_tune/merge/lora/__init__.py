"""LoRA adapters in a merge. The rest of it asks three things: whether this is one (`names`), what becomes of it (`adapt`), and, as bytes
are written, what it adds to a part of a tensor (`low_rank`)."""
