"""Launchers, which start the nodes' agents: on this machine, with Slurm or with Ray. `run_nodes` chooses one."""
