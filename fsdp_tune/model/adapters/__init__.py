"""Adapters of a frozen model: where LoRA goes, its first values, and its files."""
