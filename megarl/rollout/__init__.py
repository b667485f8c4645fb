"""Sampling on the driver process: from prompts to scored groups of trajectories. This package does not import torch.

`pool` sends requests to vLLM engine replicas and returns completions as they finish. `engine_requests` joins
completions that a pause interrupted. `attempt` runs one environment against the engines and returns a trajectory.
`groups` samples several trajectories per prompt. `buffer` collects the groups of a training step. `rl_batch` flattens
them into arrays. `evaluate` samples the validation sets.
"""
