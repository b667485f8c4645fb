"""Checks of a recipe against its models: sizes, folders, adapters, exact arithmetic."""
