"""Worker classes of the ranks, with one method per call of the driver.

A rank trains (`trainer`), samples (`engine`), or does both (`colocated`). `weights` is a rank's side of the reshard.
"""
