"""Predict the memory and the seconds of a training step before a run starts, and search for a better recipe.

`memory` predicts bytes, `seconds` times. `judge` decides whether a recipe fits its GPUs, and `verdict` prints it for
`megarl plan`. `remedies` make a recipe fit, `defaults` fill in missing fields, `layouts` finds the fastest parallel
sizes: all by `search`. No module imports torch.
"""
