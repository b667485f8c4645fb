"""Remote calls from the driver to groups of ranks."""
