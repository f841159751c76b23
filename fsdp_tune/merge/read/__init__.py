"""Read checkpoint files of any tool, without running code in them."""
