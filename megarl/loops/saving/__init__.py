"""Saving and resuming of runs: checkpoints, copies of the state in host memory, and positions in the data."""
