"""Data sets of a recipe: their records are read, counted and surveyed with the recipe's settings."""
