"""Mathematical answers as text: spelling, tokens, parser, exact and numeric values, number sets, equality.

A text is normalised (`spelling`), split into tokens (`tokens`) and parsed into a tree (`parser`, `atoms`, `commands`,
`nodes`). Two trees are compared by structure and by value (`equality`, `labels`, `exact`, `values`, `number_sets`). The
parser rejects anything unknown. Lengths, nesting, digits, exponents and factorials are limited, so that comparing any
texts takes milliseconds.
"""
