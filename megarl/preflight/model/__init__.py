"""Checks of a recipe against the models that it names: sizes, folders, adapters, exact arithmetic."""
