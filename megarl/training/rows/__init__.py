"""Batches as packed rows of tensors: the rows, the data that a forward pass gets with them, and their metrics."""
