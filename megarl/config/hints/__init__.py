"""Hints about misspelt fields and values, and about fields and values of other training programs."""
