"""Read what a user of another tool has: a configuration, a command, a shell or Python script, a notebook."""
