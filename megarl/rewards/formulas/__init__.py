"""Parser and comparison of mathematical answers in LaTeX or plain text.

A text is normalised (`spelling`), split into tokens (`tokens`) and parsed into a tree (`parser`, `atoms`, `commands`,
`nodes`). Two trees are compared by structure and by value (`equality`, `labels`, `exact`, `values`, `number_sets`). The
parser rejects anything unknown. Lengths, nesting, digits, exponents and factorials are limited, so that comparing any
texts takes milliseconds.
"""
