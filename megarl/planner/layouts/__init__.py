"""Search for the fastest layout of a recipe: parallel sizes, placement, offload, recomputation, row length.

`candidates` lists the layouts that the recipe's checks accept. `search` finds the layouts that fit and ranks them by
predicted seconds. No module imports torch.
"""
