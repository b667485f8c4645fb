"""A rank process, its messages and stacks, and its handle in the driver."""
