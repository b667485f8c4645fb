"""Parser of mathematical answers in LaTeX or plain text.

A normalised text is split into tokens (`tokens`) and parsed into a tree (`parser`, `digit_groups`, `atoms`, `commands`,
`cursor`, `nodes`). The parser rejects anything unknown. Lengths, nesting, digits, exponents and factorials are limited,
so that reading any text takes milliseconds.
"""
