"""One page for each model family: how its config.json is read, and which tensors and settings its models have."""
