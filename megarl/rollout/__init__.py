"""Sampling, on the driver process: from prompts to scored groups of trajectories.

`attempt` runs one attempt, alternating policy and environment. `groups` makes several attempts per prompt. `pool` sends
their requests to vLLM engines. `buffer` collects the groups of a training step. `step` turns them into updates, metrics
and records. `evaluate` samples the validation sets.
"""
