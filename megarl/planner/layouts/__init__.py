"""Search for the fastest layout of a recipe: parallel sizes, placement, offload, recomputation, row length.

`candidates` lists the layouts accepted by the checks of a recipe. `search` ranks them by predicted seconds, and drops
layouts that exceed the GPU memory. No module imports torch.
"""
