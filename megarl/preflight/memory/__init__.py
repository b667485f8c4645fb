"""Checks whether a run fits into memory and onto the disk, and the fields that a start chooses by the memory."""
