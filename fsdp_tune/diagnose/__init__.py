"""What this machine has, and what is known to go wrong with it."""
