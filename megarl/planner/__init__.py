"""Predict the memory and the seconds of a training step before a run starts, and search for a better recipe.

`memory` predicts bytes and `seconds` predicts times. `judge` says whether a recipe fits its GPUs. `remedies` make a
recipe fit, `defaults` fill in fields that the recipe leaves out, and `layouts` finds the fastest parallel sizes. All
three use `search`. `verdict` is printed by `megarl plan`. No module imports torch.
"""
