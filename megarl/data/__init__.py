"""Data: from files to tokens, and from tokens to balanced batches. Pure: no torch, no process group.

Reading order: `sources.rows` reads files, folders, and the Hub's cache. `formats` maps other programs' field names to
roles (prompt, answer). `reader` makes records of rows, and names the line of every error. `kinds` makes training
examples of records. `sampler` assigns examples to steps. `packing` spreads a step's sequences over data-parallel ranks
and microbatches.

Nothing is truncated or dropped silently. The items of a step depend only on the seed and on the number of items drawn
before. So a resumed run sees the same items as an uninterrupted run.
"""
