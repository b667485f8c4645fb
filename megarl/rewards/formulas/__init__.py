"""Mathematical answers as text: spelling, tokens, parser, exact and numeric values, number sets, equality.

A text is normalised (`spelling`), cut into tokens (`tokens`) and parsed into a tree (`parser`, `atoms`, `commands`,
`nodes`). Two trees are compared by structure and by value (`equality`, `labels`, `exact`, `values`, `number_sets`). The
parser refuses what it does not know. Lengths, nesting, digits, exponents and factorials are bounded, so that a
comparison takes milliseconds on any text.
"""
