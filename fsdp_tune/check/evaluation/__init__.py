"""`fsdp-tune evaluate`: score a finished model on rows of data, and compare two models on the same rows."""
