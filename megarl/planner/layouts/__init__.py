"""Search for the fastest layout of a recipe: parallel sizes, placement, offload, recomputation, row length.

`candidates` lists the layouts that the checks of a recipe allow. `search` ranks them by predicted seconds and leaves
out layouts that exceed the predicted memory. No module imports torch.
"""
