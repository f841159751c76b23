"""Save, restore and rotate checkpoints."""
