"""Memory and time of a traced step."""
