"""Rollout: the driver's side of sampling. No torch.

`pool` sends requests to the engine replicas and gathers completions as they finish, `evaluate` scores them, `buffer`
collects the groups of a step, `batches` makes of them what is trained on.
"""
