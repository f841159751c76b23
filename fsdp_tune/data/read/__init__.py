"""Rows from files and data sets."""
