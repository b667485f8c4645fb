"""A batch as rows: packed tensors, the data that forward passes get with them, and their metrics."""
