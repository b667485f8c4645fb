"""Predicted memory of a run by phase, before it starts: bytes of each kind on the fullest rank, on its GPU and host.

Modules of functions from sizes to bytes, one for each kind: `trainer`, `activations`, `engine`. `phases` assigns the
kinds to the phases of a run. `changes` finds changes making a recipe fit. No torch is used: inputs are config.json, the
parallel sizes and a few numbers. `tools/check.py planner` compares predictions with the tensors of real ranks.
"""
