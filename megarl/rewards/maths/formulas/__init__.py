"""Parser of mathematical answers in LaTeX or plain text.

A normalised text is split into tokens (`tokens`, `letters`) and parsed into a tree (`nodes`). The parser is a chain of
classes, from lists to single tokens: `parser` (with `items`), `digit_groups`, `atoms`, `scripts`, `commands`, `cursor`.
It rejects anything unknown. Lengths, nesting, digits, exponents and factorials are limited, so reading any text takes
milliseconds.
"""
