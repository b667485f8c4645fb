"""Search for the fastest layout of a recipe on its cluster: parallel sizes, placement, offload, recomputation, rows.

`candidates` lists all layouts allowed by the checks of a recipe, and counts why others are not. `search` ranks them by
predicted seconds (`planner.seconds`), under the predicted memory. No torch is used.
"""
