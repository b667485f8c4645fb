"""Workers: one process per GPU or CPU slot, and the groups through which the driver speaks to all of them.

`process_group.ProcessGroup` calls one method on every rank, or scatters one argument per rank, and gathers the results;
its kin start the ranks on other nodes (`launchers`). These channels carry commands, tokens and numbers; tensors move
only through `torch.distributed`, between the workers themselves.

A failure ends the whole group: its first cause is named, every rank is killed, and every later call fails at once.
"""
