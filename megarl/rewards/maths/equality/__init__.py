"""Comparison of two syntax trees: by structure, by exact value, and by numeric value at chosen points.

`comparison` chooses the method by the kind of answer. `labels` compares names of values, `digit_groups` times, dates
and codes, `number_sets` intervals and inequalities, `exact` rational numbers, and `values` numbers of 50 digits.
"""
