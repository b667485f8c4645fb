"""Data: from files to tokens, and from tokens to balanced batches. Pure: no torch, no process group.

Reading order: `sources.rows` reads files of every kind, folders, and the Hub's cache. `formats` maps the field names of
other programs to roles (prompt, answer). `reader` turns rows into records, checks each one and names the line of every
error. `kinds` makes training examples of records: problems, conversations, pairs or judged answers. `sampler` assigns
items to steps. `packing` spreads a step's sequences over data-parallel ranks and microbatches.

Invariants: nothing is truncated or dropped silently. The items of a step are a function of the seed and the number of
items drawn before: a resumed run sees the same items as an uninterrupted one.
"""
