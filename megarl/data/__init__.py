"""Data: from files to tokens, and from tokens to balanced batches. Pure: no torch, no process group.

Reading order: `rows` reads files of every kind, folders, and the Hub's cache. `formats` maps the field names of other
programs to roles (prompt, answer). `records` checks each record and names the line of every error. `problems` renders
the prompts for reinforcement learning. `conversations` renders the conversations for fine-tuning, with a mask of the
assistant's tokens. `sampler` assigns items to steps. `packing` spreads a step's sequences over data-parallel ranks and
microbatches.

Invariants: nothing is truncated or dropped silently. The items of a step are a function of the seed and the number of
items drawn before: a resumed run sees the same items as an uninterrupted one.
"""
