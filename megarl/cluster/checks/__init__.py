"""Checks of nodes before a run starts on them, and the report on a machine."""
