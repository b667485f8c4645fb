"""Worker classes: the objects on a rank whose methods the driver calls.

A rank trains (`trainer_worker`), samples (`engine_worker`), or does both (`colocated`). `reshard` is a rank's part in
copying weights from trainer to engine. Optional features of a training rank are parts (`trainer_part`), listed in
`trainer_parts`.
"""
