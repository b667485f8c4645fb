"""Files of the training service: checkpoints, weights to sample from, and their deletion."""
