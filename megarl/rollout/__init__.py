"""Sampling on the driver process: from prompts to scored groups of trajectories.

`attempt` lets policy and environment alternate, and returns a trajectory. `pool` sends its requests to vLLM engines.
`groups` makes several attempts per prompt. `buffer` collects the groups of a training step. `evaluate` samples the
validation sets. `step` turns a step's groups into updates, metrics and records.
"""
