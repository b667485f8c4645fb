"""Search for the fastest layout of a recipe: parallel sizes, placement, offload, recomputation, row length.

`candidates` lists the layouts accepted by the checks of a recipe. `search` ranks them by predicted seconds, and leaves
out layouts that exceed the predicted memory. No module imports torch.
"""
