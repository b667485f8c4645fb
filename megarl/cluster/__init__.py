"""The cluster: one process per GPU or CPU slot, and the groups through which the driver calls all of them.

`worker_group.WorkerGroup` calls a method on every rank, with an argument per rank if need be, or on some of them, and
gathers the results; `local` starts the ranks on this machine, `srun` and `ray` on other nodes (`launchers`). These
channels carry commands, tokens and numbers; tensors move only through `torch.distributed`, between the workers
themselves. `node_checks` and `bandwidth` find unfit nodes before anything heavy starts, `doctor` reports on a
machine.

A failure ends the whole group: its first cause is named, every rank is killed, and every later call fails at once.
"""
