"""Comparison of two syntax trees: by structure, by exact value, and by numeric value at chosen points.

`comparison` decides by the kind of answer; `labels` (names of values), `digit_groups` (times, dates, codes),
`number_sets` (intervals, inequalities), `exact` (rational numbers) and `values` (50 digits) do the work.
"""
