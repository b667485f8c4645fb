"""Items of lists in a recipe: what is wrong with one, and overrides by number."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config import Recipe
from megarl.config.recipe import load, read
from tests.config.refusals import faults

FUNCTIONS = [{"name": "boxed", "weight": 2.0}, "format", {"name": "a.py:f", "kwargs": {"x": 1}}]


@pytest.fixture
def several(small: Path) -> Path:
    values = yaml.safe_load(small.read_text()) | {"reward": {"functions": FUNCTIONS}}
    small.write_text(yaml.safe_dump(values))
    return small


@pytest.mark.parametrize(
    ("functions", "starts", "words"),
    [
        ("[{name: a.py:f, weights: 2}]", ["reward.functions.0.weights = 2: unknown key"], "reward.functions.0.weight?"),
        ("[{weight: 2}]", ["reward.functions.0.name: missing; add it"], "package.module:function"),
        (
            "[boxed, {nam: f}]",
            ["reward.functions.1.name: missing", "reward.functions.1.nam = 'f'"],
            "functions.1.name?",
        ),
        ("[{name: f, colour: 2}]", ["reward.functions.0.colour = 2: unknown key"], "known are reward.functions.0.name"),
        (
            "[{name: f, weight: x}]",
            ["reward.functions.0.weight = 'x': must be a valid number"],
            "Weight of this function",
        ),
        ("[3]", ["reward.functions.0 = 3: must be a name"], "weight"),
        (
            "[{name: a, wieght: 2, wight: 3}]",
            ["reward.functions.0.wieght = 2", "reward.functions.0.wight = 3"],
            "weight",
        ),
    ],
)
def test_a_fault_of_an_item_is_named(small: Path, functions: str, starts: list[str], words: str) -> None:
    lines = faults(small, f"reward.functions={functions}")
    assert len(lines) == len(starts) and words in "".join(lines)
    for start in starts:
        assert any(line.strip().startswith(start) for line in lines), lines
    of_source = faults(small, f"mixture.a.reward.functions={functions}", "mixture.a.data.train=t")
    for start in starts:
        assert any(line.strip().startswith(f"mixture.a.{start}") for line in of_source), of_source


def weights(recipe: Recipe) -> list[tuple[str, float]]:
    return [(function.name, function.weight) for function in recipe.reward.functions]


def test_an_item_is_overridden_by_its_number(several: Path) -> None:
    assert weights(load(several, ["reward.functions.0.weight=0.5"])) == [("boxed", 0.5), ("format", 1), ("a.py:f", 1)]
    assert weights(load(several, ["reward.functions.1.weight=0.5"])) == [("boxed", 2), ("format", 0.5), ("a.py:f", 1)]
    assert weights(load(several, ["reward.functions.1=gsm8k"])) == [("boxed", 2), ("gsm8k", 1), ("a.py:f", 1)]
    merged = load(several, ["reward.functions.2.kwargs={y: 2}", "reward.functions.2.kwargs.z=3"])
    assert merged.reward.functions[2].kwargs == {"x": 1, "y": 2, "z": 3}
    assert load(several, ["reward.functions.2.kwargs={}"]).reward.functions[2].kwargs == {}
    later = load(several, ["reward.functions=[code, judge]", "reward.functions.1.weight=3"])
    assert weights(later) == [("code", 1), ("judge", 3)]


def test_the_default_list_has_items_too(small: Path) -> None:
    assert weights(load(small, ["reward.functions.0.weight=0.5"])) == [("boxed", 0.5)]
    assert load(small, ["optimizer.betas.1=0.99"]).optimizer.betas == (0.9, 0.99)


def test_an_item_of_a_default_or_inherited_list_is_removed(several: Path) -> None:
    inherited = load(several, ["mixture.a.data.train=t", "~mixture.a.reward.functions.0"])
    assert weights(inherited.sources[0].recipe) == [("format", 1), ("a.py:f", 1)]
    assert weights(load(several, ["~reward.functions", "~reward.functions.0", "reward.model=r"])) == []


def test_a_reference_of_an_item_is_named_like_an_override(several: Path) -> None:
    draft = read(several, ["reward.functions.0.weight=${nothing}"])
    [line] = draft.problems
    assert line.startswith("reward.functions.0.weight: ") and "or as reward.functions.0.weight=VALUE" in line
    assert draft.unread == {"reward.functions.0.weight"}


def test_a_source_without_a_list_of_its_own_begins_with_the_recipes(several: Path) -> None:
    recipe = load(several, ["mixture.a.data.train=t", "mixture.a.reward.functions.0.weight=5"])
    assert weights(recipe.sources[0].recipe) == [("boxed", 5), ("format", 1), ("a.py:f", 1)]
    [notice] = recipe.notices
    assert "reward.functions = " in notice, "no source has the recipe's own list"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "reward.functions.3.weight=1",
            "reward.functions.3.weight: reward.functions has 3 items; their numbers are 0 to 2",
        ),
        (
            "reward.functions.1.weigth=1",
            "reward.functions.1.weigth = 1: unknown key; did you mean reward.functions.1.weight",
        ),
        ("~reward.functions.3", "~reward.functions.3: reward.functions has 3 items; their numbers are 0 to 2"),
        ("~rollout.sampling.stop.0", "~rollout.sampling.stop.0: rollout.sampling.stop has 0 items"),
        ("rollout.sampling.stop.0=x", "rollout.sampling.stop.0: rollout.sampling.stop has 0 items"),
        ("reward.functions.1.weight=x", "reward.functions.1.weight = 'x': must be a valid number"),
    ],
)
def test_an_override_of_an_item_that_cannot_be_is_named(several: Path, override: str, words: str) -> None:
    [line] = faults(several, override)
    assert words in line


def test_a_validation_set_may_have_a_number_for_a_name(small: Path) -> None:
    assert load(small, ["data.validation.0=x"]).data.validation == {"0": "x"}
