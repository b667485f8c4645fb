"""Training service: a server for programs written with the Tinker SDK, on a recipe's trainer and engines."""
