"""Checks whether a run fits into memory and onto the disk."""
