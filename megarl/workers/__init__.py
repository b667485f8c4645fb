"""Workers: one process per GPU or CPU slot, and the groups through which the driver speaks to all of them.

`group.WorkerGroup` is the protocol: call one method on every rank, or scatter one argument per rank, and gather
the results. `process_group.ProcessGroup` keeps it with processes of this machine. These channels carry commands,
tokens and numbers; tensors move only through `torch.distributed`, between the workers themselves.

A failure ends the whole group: its first cause is named, every rank is killed, and every later call fails at once.
"""
