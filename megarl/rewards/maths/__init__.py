"""Comparison of a predicted with a gold answer: `agreement.agreement`. README.md says which forms are accepted.

Reading order: `spelling` (one way to write LaTeX and Unicode), `choice_letters`, `quantities` and `units` (numbers with
units), `formulas` (text to syntax tree), `equality` (comparison of two trees), `agreement`.
"""
