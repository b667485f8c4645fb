"""Rank processes of a run (one per GPU or CPU slot), and remote calls from the driver to them.

`launchers` start one agent per node: on this machine, with Slurm, or with Ray. `agents` fork ranks and relay calls to
them. `ranks` is a rank's main program. `calls` calls methods on ranks. These connections carry commands, tokens and
numbers. Tensors move only through `torch.distributed`, directly between ranks. `checks` finds unfit nodes before a run
starts. `rank_model` and `reshard_calls` make the calls of a training step.
"""
