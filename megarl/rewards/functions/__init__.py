"""Reward functions named in recipes, and readers of completions. `megarl.rewards.REWARDS` lists the functions."""
