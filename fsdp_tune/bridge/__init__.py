"""What launcher and ranks both need from transformers, loaded when asked for."""
