"""FSDP units, wrapping, recomputation and offload of activations."""
