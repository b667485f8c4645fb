"""Epochs instead of steps, a share of a run as warm-up, and names on the Hub in place of folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import OptimizerConfig, Recipe
from megarl.config.recipe import load, to_yaml
from megarl.datasets.counts import with_steps
from megarl.files import hub
from megarl.preflight import check
from megarl.types import ConfigError, DataError
from tests.preflight.records import RECORD

LONG = {"messages": {"role": "user", "content": "1 + " * 200 + "2"}, "gt_answer": "402"}


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [(1, 3, 1), (2, 3, 2), (1, 2, 2), (2.5, 2, 4), (0.1, 32, 1), (50, 4, 38)]
)
def test_steps_follow_from_epochs(recipe: Callable[..., Recipe], epochs: float, prompts: int, steps: int) -> None:
    made = with_steps(recipe(train={"epochs": epochs, "prompts_per_step": prompts}))
    assert made.train.steps == steps
    assert with_steps(recipe(train={"steps": 7})).train.steps == 7


@pytest.mark.parametrize(("epochs", "prompts", "steps"), [(1.1, 10, 11), (0.07, 1, 7), (1.1, 9, 13)])
def test_epochs_are_counted_as_they_are_written(
    recipe: Callable[..., Recipe], tmp_path: Path, epochs: float, prompts: int, steps: int
) -> None:
    """1.1 * 100 and 0.07 * 100 are a little more than 110 and 7 in floating point."""
    path = tmp_path / "hundred.jsonl"
    path.write_text(f"{json.dumps(RECORD)}\n" * 100)
    made = recipe(data={"train": str(path)}, train={"epochs": epochs, "prompts_per_step": prompts})
    assert with_steps(made).train.steps == steps


def test_what_is_too_long_is_in_no_epoch(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (RECORD, LONG, RECORD, LONG)))
    train = {"epochs": 3, "prompts_per_step": 2}
    assert with_steps(recipe(data={"train": str(path), "overlong": "drop"}, train=train)).train.steps == 3
    made = recipe(data={"train": "environment:10"}, train=train)
    assert with_steps(made).train.steps == 15
    absent = recipe(data={"train": str(tmp_path / "absent")}, train=train)
    assert with_steps(absent) == absent
    with pytest.raises(DataError, match="is not there"):
        check(absent)


def test_a_recipe_with_epochs_is_written_and_read_with_them(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A resumed run counts its steps anew, and gives the same number."""
    made = with_steps(recipe(train={"epochs": 2, "prompts_per_step": 3}))
    text = to_yaml(made)
    assert "epochs: 2.0" in text and " steps:" not in text
    (tmp_path / "again.yaml").write_text(text)
    assert with_steps(load(tmp_path / "again.yaml")).train.steps == made.train.steps == 2
    replaced = load(tmp_path / "again.yaml", ["train.steps=5"])
    assert (replaced.train.steps, replaced.train.epochs) == (5, None) and "train.epochs = 2.0" in replaced.notices[0]
    with pytest.raises(ConfigError, match=r"train\.steps = 5: does nothing under train\.epochs=1\.0; leave it out"):
        load(tmp_path / "again.yaml", ["train.steps=5", "train.epochs=1"])


def test_warm_up_as_a_share_of_the_run() -> None:
    assert OptimizerConfig(warmup_ratio=0.03).warmup_updates(200) == 6
    assert OptimizerConfig(warmup_steps=5).warmup_updates(200) == 5
    assert OptimizerConfig(warmup_steps=5).warmup_updates(3) == 3


def test_a_model_is_found_by_its_name_on_the_hub(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = recipe()
    repository = tmp_path / "cache" / "models--megarl-tests--tiny"
    shutil.copytree(own.model.path, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.cached_folder.cache_clear()
    try:
        made = recipe(model={"path": "megarl-tests/tiny"})
        assert made.model.folder == str(repository / "snapshots" / "abc")
        assert check(made) == check(own)
        with pytest.raises(DataError, match="hf download megarl-tests/other;"):
            check(recipe(model={"path": "megarl-tests/other"}))
    finally:
        hub.cached_folder.cache_clear()
