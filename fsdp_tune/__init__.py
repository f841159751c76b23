"""fsdp-tune: fine-tune causal language models with PyTorch FSDP, and know that the run is what the recipe says."""

__version__ = "0.1.0"
