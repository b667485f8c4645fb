"""Rows of sequences with shared prefixes: each distinct prefix is stored once, and the row is a tree.

`attention` attends over a tree, `core_attention` adds tree attention to a model's layers, and `row` describes the row
to the model.
"""
