"""The workers of the ranks, verb by verb, as the driver calls them.

A rank trains (`trainer`), samples (`engine`), or does both (`colocated`); `weights` is its end of the reshard.
"""
