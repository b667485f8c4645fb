"""Checks of nodes before a run starts, and the report on a machine."""
