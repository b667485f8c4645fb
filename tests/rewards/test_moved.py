"""Modules of rewards are importable under their old names, with a warning that gives the new one."""

from __future__ import annotations

import importlib
import sys

import pytest

import megarl.rewards.moved as moved
from megarl.rewards.functions.marked_answers import boxed


@pytest.mark.parametrize("name", moved._MOVED)
def test_an_old_name_is_the_new_module(name: str) -> None:
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=moved._MOVED[name]):
        module = importlib.import_module(name)
    new = importlib.import_module(moved._MOVED[name])
    assert any(vars(new)[key] is value for key, value in vars(module).items() if callable(value))


def test_a_reward_is_the_same_function_under_both_names() -> None:
    old = importlib.import_module("megarl.rewards.boxed")
    assert old.boxed is boxed


def test_other_names_are_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"megarl\.rewards\.boxes"):
        importlib.import_module("megarl.rewards.boxes")
