"""What several sides need and nobody owns: devices, tokenizers, the differences between versions of the libraries."""
