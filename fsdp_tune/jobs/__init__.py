"""What the commands do, without a screen: the public Python API. Imports neither torch nor a terminal library."""
