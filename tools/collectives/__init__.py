"""The communication of all ranks in a training step: recorded rank by rank on an imagined device, then compared.

`programs` has the data, `agreement` compares the ranks' calls, `waits` executes them in order, `links` counts bytes.
These four need no torch. `recorded_group` is a process group that records, `imagined_device` a device without memory,
`traced_rank` runs megarl's training step on both.
"""
