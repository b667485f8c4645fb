"""Imports of large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold back the cyclic garbage collector while libraries are imported, then hide from it what is there.

    It would go through the objects of torch, vLLM and Megatron again and again, also later and at the process's end,
    and free next to nothing: a quarter of a rank's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def kept_frozen() -> Iterator[None]:
    """Hold back `gc.unfreeze`, which vLLM calls at an engine's end: each collection would go through all libraries."""
    unfreeze = gc.unfreeze
    gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.unfreeze = unfreeze
