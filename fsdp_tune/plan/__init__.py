"""Memory, time and the best recipe, computed from a traced step. Pure: numpy, no torch."""
