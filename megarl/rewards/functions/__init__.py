"""Reward functions with a name in recipes, and what they read in a completion. `megarl.rewards.REWARDS` lists them."""
