"""Control of Python's garbage collector around imports of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disable_collector() -> Iterator[None]:
    """Disable the cyclic garbage collector during imports, then exempt all existing objects from it.

    Otherwise it scans the objects of torch, vLLM and Megatron again and again, even at exit. It frees almost nothing,
    and takes a quarter of a rank's start time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without(library: str) -> Iterator[None]:
    """Make `import library` fail inside this context, unless it is imported already.

    Other libraries import it for unused functions, and each import takes tenths of a second.
    """
    if library in sys.modules:
        yield
        return
    # Python raises ModuleNotFoundError for a module recorded as None.
    sys.modules[library] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[library]


@contextmanager
def unfreeze_disabled() -> Iterator[None]:
    """Make `gc.unfreeze` do nothing inside this context. vLLM 0.30 calls it when an engine shuts down."""
    # After an unfreeze, each collection would scan the objects of all libraries.
    unfreeze = gc.unfreeze
    gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.unfreeze = unfreeze
