"""Sampling on the driver process: from prompts to scored groups of trajectories.

`pool` sends requests to vLLM engine replicas and returns completions as they finish, and `pool_meter` counts their
tokens. `engine_requests` joins completions that a pause interrupted. `attempt` runs one environment and returns a
trajectory; `attempt_engine` records its completions and measures its waits. `groups` samples several trajectories per
prompt. `buffer` collects the groups of a training step. `evaluate` samples the validation sets. `step` makes updates,
metrics and records of a step's groups.
"""
