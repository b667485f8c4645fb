"""Rows with sequences that share prefixes: each distinct prefix is stored once, and the row is a tree.

`attention` attends over a tree, `core_attention` gives it to a model's layers, `row` describes the row to the model.
Other modules know `PackedRow` only.
"""
