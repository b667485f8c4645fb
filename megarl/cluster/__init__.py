"""Rank processes of a run (one per GPU or CPU slot), and remote calls from the driver to them.

`launchers` start one agent on each node: on this machine, with Slurm, or with Ray. `agents` fork ranks and relay calls
to them. `ranks` has a rank's main program. `calls.worker_group.WorkerGroup` calls a method on all ranks, or on some,
and gathers the results. Each rank may get an argument of its own. These connections carry commands, tokens and numbers.
Tensors move only through `torch.distributed`, directly between ranks. `checks` finds unfit nodes before anything heavy
starts, and reports on a machine. `rank_model` and `reshard_calls` make the calls of a training step.

A failure ends the whole group. Its error names the first cause, every rank is killed, and every later call fails at
once.
"""
