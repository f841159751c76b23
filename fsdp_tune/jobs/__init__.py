"""The commands as functions without terminal output: the public Python API. Imports neither torch nor a
terminal library."""
