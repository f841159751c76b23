"""The rank process: `python -m fsdp_tune.worker RUN_DIR`, started by a launcher; no module imports it."""
