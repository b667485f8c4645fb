"""Recipe fields that a service leaves to its clients, or that only a training run reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config.recipe import load
from megarl.config.schema import field_at
from megarl.service.command import UNUSED, _list_unfit_fields, warn_of_unused_fields


def write_recipe(folder: Path) -> Path:
    recipe = {"name": "s", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, "lora": {"rank": 8}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_fields_without_effect_in_a_service_are_named(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    assert [*warn_of_unused_fields(load(path, ["rollout.sampling.max_new_tokens=9", "trainer.tp=2"]))] == []
    overrides = [
        "monitor.port=9400", "optimizer.learning_rate=1e-3", "rollout.sampling.temperature=0.5", "train.steps=3",
        "weights.check_every=1", "data.validation.heldout=h", "trainer.share_prefixes=auto",
    ]  # fmt: skip
    [notice] = warn_of_unused_fields(load(path, overrides))
    names = (
        "data.validation, trainer.share_prefixes, optimizer.learning_rate, rollout.sampling.temperature, train, "
        "weights.check_every, monitor"
    )
    assert notice.startswith(f"not used by a service: {names}. ")


@pytest.mark.parametrize("override", ["trainer.router_replay=true", "lora.dropout=0.1", "loop=sft"])
def test_a_field_that_a_service_cannot_honour_is_refused(tmp_path: Path, override: str) -> None:
    path = write_recipe(tmp_path)
    assert [*_list_unfit_fields(load(path, []))] == []
    field = override.partition("=")[0]
    [fault] = _list_unfit_fields(load(path, [override]))
    assert fault.startswith(f"{field} = ")


def test_the_unused_fields_exist() -> None:
    assert [name for name in UNUSED if field_at(name) is None] == []
