"""FSDP units, wrapping, recomputation and offloading of activations."""
