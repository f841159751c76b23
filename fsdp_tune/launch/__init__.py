"""Start the ranks of a resolved recipe and turn their end into one exit code. Uses the stack only through its
command line and files."""
