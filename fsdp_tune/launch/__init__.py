"""From a resolved recipe to running ranks, and back to one exit code. Pure: knows the stack by its command line and files."""
