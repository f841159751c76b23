"""The computation of two recipes stage by stage, from tokens to the update, and the first place at which they
differ."""
