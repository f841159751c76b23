"""LoRA adapters in a merge: names of their tensors, the plan of updates, and the updates of parts of a
tensor."""
