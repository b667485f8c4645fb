"""vLLM inside the trainer's ranks.

A worker owns an `engine.RolloutEngine`: `advance` samples for a while, then returns the rank to the trainer. The first
rank of a tensor-parallel group owns vLLM's scheduler. Through `executor` it sends commands to the other ranks.
"""
