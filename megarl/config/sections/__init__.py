"""The sections of a recipe: their fields, each with type, default, condition and meaning."""
