"""The planner: predicted memory and seconds of a recipe, and the one search over changed recipes.

`memory` predicts bytes by phase and `seconds` the time of a step. `judge` says whether a recipe fits its GPUs. `search`
is the search by moves: `remedies` make a recipe fit, `defaults` fill in fields that it leaves out, and `layouts` finds
its fastest layouts. `verdict` is what `megarl plan` prints. `sizes` and `model_sizes` are the rules that searches obey.
No torch is used.
"""
