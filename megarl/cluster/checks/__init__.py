"""Checks of nodes before anything heavy starts on them, and the report on a machine."""
