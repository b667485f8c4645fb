"""The engine: vLLM inside the trainer's ranks.

`engine.RolloutEngine` is what a worker holds: `advance` samples for a while and hands the rank back. `executor` is how
the first rank of a tensor-parallel group, which owns vLLM's scheduler, moves the others.
"""
