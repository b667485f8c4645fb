"""Mixtures: what a source has for itself, and what is wrong with one, by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.recipe import load, read, to_yaml
from tests.config.refusals import faults

MIXED = """
name: mixed
loop: rl
model: {path: m}
rollout: {sampling: {max_new_tokens: 64, temperature: 0.9}}
algorithm: {preset: dapo}
mixture:
  sums:
    weight: 3
    data: {train: sums.jsonl, validation: {heldout: h.jsonl}}
    rollout: {sampling: {max_new_tokens: 24}}
  games:
    data: {train: "environment:64"}
    rollout: {environment: guess_number, environment_kwargs: {max_number: 16}, max_turns: 4}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MIXED)
    return path


def test_a_source_has_its_own_fields_and_the_others_of_the_recipe(mixed: Path) -> None:
    recipe = load(mixed, ["mixture.games.weight=0.5"])
    sums, games = recipe.sources
    assert [(source.name, source.weight) for source in recipe.sources] == [("sums", 3.0), ("games", 0.5)]
    assert sums.recipe.rollout.sampling.max_new_tokens == 24 and games.recipe.rollout.sampling.max_new_tokens == 64
    assert {source.recipe.rollout.sampling.temperature for source in recipe.sources} == {0.9}
    assert sums.recipe.rollout.environment == "single_turn" and games.recipe.rollout.environment == "guess_number"
    assert [source.recipe.algorithm.overlong_buffer for source in recipe.sources] == [4, 12], "a fifth of each"
    assert (recipe.context_tokens, recipe.longest_trajectory) == (1024 + 64, 4 * 64)
    assert sums.place("data.train") == "mixture.sums.data.train" and sums.place("data.shuffle") == "data.shuffle"


def test_without_a_mixture_the_recipe_is_its_only_source(small: Path) -> None:
    recipe = load(small)
    [source] = recipe.sources
    assert (source.name, source.recipe) == ("single_turn", recipe) and source.place("data.train") == "data.train"


def test_what_is_written_is_read_back(mixed: Path, tmp_path: Path) -> None:
    written = to_yaml(load(mixed))
    assert "weight: 3.0" in written and "train: null" not in written
    (tmp_path / "again.yaml").write_text(written)
    assert to_yaml(load(tmp_path / "again.yaml")) == written


@pytest.mark.parametrize(
    ("override", "start", "remedy"),
    [
        pytest.param(
            "mixture.games.rollout.sampling.temprature=3",
            "mixture.games.rollout.sampling.temprature = 3: unknown key",
            "temperature",
            id="misspelt field",
        ),
        pytest.param("mixture.games.weigth=3", "mixture.games.weigth = 3: unknown key", "weight", id="misspelt weight"),
        pytest.param("mixture.games.weight=0", "mixture.games.weight = 0", "greater than 0", id="weight"),
        pytest.param("mixture.games.rollout.tp=2", "mixture.games.rollout.tp = 2", "max_turns", id="of the whole run"),
        pytest.param("mixture.games.rollout.max_turns=0", "mixture.games.rollout.max_turns = 0", "greater", id="value"),
        pytest.param(
            "mixture.sums.rollout.environment_kwargs={max_number: 16}",
            "mixture.sums.rollout.environment_kwargs = {'max_number': 16}: does nothing",
            "rollout.environment to another",
            id="field that does nothing",
        ),
        pytest.param("data.train=t", "data.train = 't': does nothing under mixture=sums, games", "own", id="idle data"),
        pytest.param("data.validation.x=t", "data.validation = ", "mixture.NAME.data.validation", id="whose set"),
        pytest.param(
            "mixture.games.data.validation.heldout=g.jsonl",
            "mixture.games.data.validation = 'heldout'",
            "another",
            id="two sets of a name",
        ),
        pytest.param("mixture.third.weight=1", "mixture.third.data.train: missing", "add it", id="no data"),
        pytest.param("mixture.games=3", "mixture.games = 3", "section", id="no section"),
        pytest.param("data.curriculum.band=[0.9,0.1]", "data.curriculum = ", "swap", id="band"),
        pytest.param("data.curriculum.memory=0.9", "data.curriculum.memory = 0.9", "curriculum.band", id="no band"),
    ],
)
def test_a_fault_is_named_where_it_stands(mixed: Path, override: str, start: str, remedy: str) -> None:
    [line] = faults(mixed, override)
    assert line.strip().startswith(start) and remedy in line


def test_a_mixture_is_of_rl(mixed: Path) -> None:
    draft = read(mixed, ["loop=sft"])
    assert any("mixture = " in notice and "under loop=sft" in notice for notice in draft.recipe.notices)
    assert any(line.startswith("data.train: missing") for line in draft.problems), "only sources had it"
    own = mixed.with_name("sft.yaml")
    own.write_text(MIXED.replace("loop: rl", "loop: sft"))
    assert any(line.startswith("mixture = ") and "under loop=sft" in line for line in read(own).problems)


def test_epochs_of_a_mixture_are_refused(mixed: Path) -> None:
    [line] = faults(mixed, "train.epochs=2")
    assert line.startswith("  train.epochs = 2.0: does nothing under mixture=sums, games") and "mixture=default" in line


def test_a_field_of_a_source_that_an_override_leaves_without_effect_is_dropped(mixed: Path) -> None:
    recipe = load(mixed, ["mixture.games.rollout.environment=single_turn"])
    [notice] = recipe.notices
    assert (
        "mixture.games.rollout.environment_kwargs = {'max_number': 16}, mixture.games.rollout.max_turns = 4" in notice
    )
    assert recipe.mixture["games"].rollout.keys() == {"environment"}
