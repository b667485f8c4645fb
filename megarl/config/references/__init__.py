"""References generated from the recipe schema: the table of fields, the JSON Schema, and shell completion."""
