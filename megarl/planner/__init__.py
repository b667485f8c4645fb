"""Predict the memory and the seconds of a training step before a run starts, and search for a better recipe.

`memory` predicts bytes, `seconds` predicts times. `judge` decides whether a recipe fits its GPUs. `remedies` make a
recipe fit, `defaults` fill in missing fields, and `layouts` finds the fastest parallel sizes. All three use `search`.
`megarl plan` prints the `verdict`. No module imports torch.
"""
