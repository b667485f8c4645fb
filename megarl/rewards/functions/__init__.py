"""Reward functions with a name in recipes, and readers of completions. `megarl.rewards.REWARDS` lists the functions."""
