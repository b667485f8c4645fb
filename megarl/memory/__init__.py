"""Memory of a run by phase, before a start: what each kind takes on the fullest rank, of its GPU and of the host.

Each kind is a module of functions from sizes to bytes (`trainer`, `activations`, `engine`), `phases` lays them over the
phases of a run, `changes` finds what makes a recipe fit. No torch: everything is computed from config.json, the
parallel sizes and a few numbers. `tools/check_planner.py` compares with tensors that real ranks hold.
"""
