"""Select, cut and pack examples into the rows of sets."""
