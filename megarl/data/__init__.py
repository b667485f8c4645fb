"""Data: from files to tokens, and from tokens to balanced batches. Pure: no torch, no process group.

Reading order: `sources.rows` reads files of every kind, folders, and the Hub's cache. `formats` maps the field names of
other programs to roles (prompt, answer). `reader` turns rows into records and names the line of every error. `kinds`
makes training examples of records. `sampler` assigns them to steps. `packing` spreads a step's sequences over
data-parallel ranks and microbatches.

Nothing is truncated or dropped silently. The items of a step depend only on the seed and on the number of items drawn
before, so a resumed run sees the same items as an uninterrupted one.
"""
