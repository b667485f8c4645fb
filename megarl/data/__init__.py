"""From files to tokens, and from tokens to balanced batches. Pure: no torch, no process group.

Reading order: `rows` reads files of every kind, folders and the Hub's cache; `formats` knows in which fields whose data
have what; `records` names the line of every fault; `problems` renders the prompts that reinforcement learning samples
from; `conversations` renders the dialogues that fine-tuning imitates, with a mask of what the assistant said; `sampler`
says which items belong to which step; `packing` spreads a step's sequences over data-parallel ranks and microbatches.

Invariants: nothing is cut or dropped in silence. The items of a step are a function of (seed, step), so a resumed run
sees what the uninterrupted one would have seen.
"""
