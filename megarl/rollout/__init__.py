"""Rollout: the driver's side of sampling. No torch.

`pool` sends requests to the engine replicas and returns completions as they finish, `parts` joins one that was parked
meanwhile, `attempt` drives an environment with them to a trajectory, `groups` samples groups of those, `buffer`
collects the groups of a step, `batch` flattens them for training, `evaluate` samples validation sets.
"""
