"""Forms to token ids and the mask of trained tokens."""
