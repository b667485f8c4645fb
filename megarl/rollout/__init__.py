"""Sampling, on the driver process: from prompts to scored groups of trajectories.

`attempt` runs one attempt: policy and environment alternate, and the result is a trajectory. `groups` makes several
attempts per prompt. `pool` sends their requests to vLLM engines. `buffer` collects the groups of a training step.
`step` turns these groups into updates, metrics and records. `evaluate` samples the validation sets.
"""
