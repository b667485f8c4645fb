"""Data sets that a recipe names: their records are read, counted and surveyed with the recipe's settings."""
