"""Checks of chat templates: texts that they leave out, turns that they end or rewrite."""
