"""Values of config.json, checked: sizes, rotary embeddings, attention windows. No torch."""
