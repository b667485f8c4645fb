"""Process groups of torch."""
