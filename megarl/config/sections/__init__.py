"""The sections of a recipe: their fields, with type, default, condition and meaning."""
