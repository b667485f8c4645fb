"""Rank processes of a run (one per GPU or CPU slot), and remote calls from the driver to them.

`worker_group.WorkerGroup` calls a method on all ranks, or on some, and gathers the results. Each rank may get an
argument of its own. `local` starts ranks on this machine, `srun` and `ray` on other nodes; `launchers` chooses. These
connections carry commands, tokens and numbers. Tensors move only through `torch.distributed`, directly between ranks.
`node_checks` and `bandwidth` find unfit nodes before anything heavy starts. `doctor` reports on a machine.

A failure ends the whole group. Its error names the first cause, every rank is killed, and every later call fails at
once.
"""
