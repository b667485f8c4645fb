"""Hints to the recipe field or value that a user means: misspelt, or in another program's words."""
