"""Hints about misspelt fields and values, and about those of other training programs."""
