"""Predict the memory of a run before it starts: bytes on a rank's GPU and host, by phase and by use.

Inputs are config.json, the parallel sizes and the recipe. `trainer_bytes`, `activations` and `engine_bytes` compute one
use each, `phases` lists the uses of each phase. `tools/check.py planner` compares predictions with tensors of real
ranks.
"""
