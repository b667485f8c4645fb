"""The driver's side of sampling. No torch.

`pool` sends requests to the engine replicas and returns completions as they finish. `parts` joins completions
interrupted by a pause. `attempt` runs an environment with them and returns a trajectory. `groups` samples groups of
trajectories. `buffer` collects the groups of a step. `batch` flattens them for training. `evaluate` samples validation
sets.
"""
