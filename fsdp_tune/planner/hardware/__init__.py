"""GPUs, their datasheets and their efficiency."""
