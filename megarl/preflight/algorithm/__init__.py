"""Checks of the algorithm: fields that depend on each other, losses, staleness, the policy as its own teacher."""
