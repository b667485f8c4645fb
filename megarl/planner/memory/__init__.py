"""Prediction of a run's memory before it starts: bytes by phase and by use, on the fullest rank, on its GPU and its
host.

Modules of functions from sizes to bytes, one for each use: `trainer_bytes`, `activations`, `engine_bytes`. `phases`
says which uses exist in which phase of a run. Inputs are config.json, the parallel sizes and a few numbers.
`tools/check.py planner` compares predictions with the tensors of real ranks.
"""
