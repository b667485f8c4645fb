"""A rank process, its messages and stacks, and the driver's view of it."""
