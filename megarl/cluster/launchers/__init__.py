"""Launchers, which start the nodes' agents. `run_nodes` chooses one."""
