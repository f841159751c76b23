"""Read rows from files and data sets."""
