"""The training state of a rank: its parts, checkpoints, copies in host memory and fingerprints."""
