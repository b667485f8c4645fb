"""Data sets of a recipe: reading, counting and surveying their records with the recipe's settings."""
