"""Reads a recipe's text and overrides into valid values, or into error lines with field, fault and remedy."""
