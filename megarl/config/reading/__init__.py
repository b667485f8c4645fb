"""From a recipe's text and overrides to valid values, or to error lines that name field, fault and remedy."""
