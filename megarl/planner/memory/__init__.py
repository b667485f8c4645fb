"""Predict the memory of a run before it starts: bytes on a rank's GPU and host, by phase and by use.

`trainer_bytes`, `activations` and `engine_bytes` compute the bytes of one use each. `phases` lists the uses of each
phase. Inputs are config.json, the parallel sizes and the recipe. `tools/check.py planner` compares predictions with the
tensors of real ranks.
"""
