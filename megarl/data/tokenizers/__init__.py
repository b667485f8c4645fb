"""Checks of tokenizers before they encode text of any length."""
