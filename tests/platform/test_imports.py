"""Imports without the garbage collector."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from megarl.platform.imports import disable_collector, unfreeze_disabled, without


def test_the_collector_waits_and_leaves_alone_what_is_there_then() -> None:
    frozen = gc.get_freeze_count()
    with disable_collector():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ImportError), disable_collector():
        import megarl.no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert gc.isenabled()


def test_what_is_hidden_stays_so_whatever_a_library_asks() -> None:
    unfreeze = gc.unfreeze
    gc.freeze()
    frozen = gc.get_freeze_count()
    with unfreeze_disabled():
        gc.unfreeze()
    # What nobody refers to any longer goes all the same.
    assert gc.get_freeze_count() > 0.9 * frozen > 0 and gc.unfreeze is unfreeze


def test_a_hidden_library_is_absent_only_inside_the_block() -> None:
    sys.modules.pop("this", None)
    with without("this"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("this")
    with without("json"):
        import json
    assert "this" not in sys.modules and json is sys.modules["json"]
