"""model.override_config: what may be changed, and what a config.json is then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.override import apply_override, engine_overrides, override_fault
from megarl.config.recipe import load
from megarl.families.config_json.rotary import Rotary
from megarl.families.shape import read_model_shape
from megarl.types import DataError
from tests.config.refusals import faults

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
OLDER = {"hidden_size": 8, "rope_theta": 1e6, "rope_scaling": None}
PARTIAL = {"partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1], "mrope_interleaved": True}
NEWER = {"hidden_size": 8, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}


@pytest.mark.parametrize(
    ("config", "override", "expected"),
    [
        pytest.param(OLDER, {}, OLDER, id="nothing"),
        pytest.param(OLDER, {"rope_theta": 5e6}, {**OLDER, "rope_theta": 5e6}, id="theta, older"),
        pytest.param(
            NEWER,
            {"rope_theta": 5e6},
            {"hidden_size": 8, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            id="theta, newer",
        ),
        pytest.param(
            OLDER, {"rope_scaling": LLAMA3}, {**OLDER, "rope_scaling": LLAMA3}, id="scaling keeps theta, older"
        ),
        pytest.param(
            NEWER,
            {"rope_scaling": LLAMA3, "rope_theta": 2e6},
            {"hidden_size": 8, "rope_parameters": {"rope_theta": 2e6, **LLAMA3}},
            id="scaling and theta, newer",
        ),
        pytest.param(
            OLDER,
            {"rope_parameters": {"rope_theta": 7e6, **LLAMA3}},
            {**OLDER, "rope_theta": 7e6, "rope_scaling": LLAMA3},
            id="newer words for an older file",
        ),
        pytest.param(
            {**OLDER, "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}},
            {"rope_theta": 3e6},
            {**OLDER, "rope_theta": 3e6, "rope_scaling": LLAMA3},
            id="the oldest name of the type",
        ),
        pytest.param({**OLDER, "rope_scaling": LLAMA3}, {"rope_scaling": None}, OLDER, id="no scaling"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", **PARTIAL}},
            {"rope_scaling": LLAMA3},
            {"rope_parameters": {"rope_theta": 1e6, **PARTIAL, **LLAMA3}},
            id="scaling keeps the rotated fraction, newer",
        ),
        pytest.param(
            {**OLDER, "partial_rotary_factor": 0.75},
            {"rope_parameters": LLAMA3},
            {**OLDER, "partial_rotary_factor": 0.75, "rope_scaling": LLAMA3},
            id="scaling keeps the rotated fraction, older",
        ),
        pytest.param({"hidden_size": 8}, {"rms_norm_eps": 1e-5}, {"hidden_size": 8, "rms_norm_eps": 1e-5}, id="added"),
    ],
)
def test_fields_are_changed_in_the_file_s_own_form(
    config: dict[str, Any], override: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(config)
    changed = apply_override(config, override)
    assert changed == expected and json.dumps(config) == before
    # What is changed already is not changed again.
    assert apply_override(changed, override) == changed


def test_the_engine_is_given_whole_fields() -> None:
    override = {"rope_theta": 5e6, "max_position_embeddings": 99}
    whole = {"max_position_embeddings": 99, "rope_parameters": {"rope_theta": 5e6, **LLAMA3}}
    assert engine_overrides({**OLDER, "rope_scaling": LLAMA3}, override) == whole
    assert engine_overrides(OLDER, {"rms_norm_eps": 1e-5}) == {"rms_norm_eps": 1e-5}
    # What neither file nor override says is the family's.
    of_family = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    found = engine_overrides({"hidden_size": 8}, {"rope_scaling": LLAMA3}, of_family)
    assert found == {"rope_parameters": {**of_family, **LLAMA3}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            {"hidden_size": 16},
            "hidden_size cannot be changed: it determines the shapes of the folder's weights; permitted are",
        ),
        ({"architectures": ["X"]}, "architectures cannot be changed: it identifies the model"),
        ({"dtype": "float16"}, "dtype cannot be changed: set model.dtype instead"),
        ({"rope_thta": 1e6}, "rope_thta cannot be changed: it is not a permitted field"),
        ({"rope_theta": "5e6"}, "rope_theta is '5e6'; give a number above 0"),
        ({"rope_theta": True}, "rope_theta is True; give a number above 0"),
        ({"rope_scaling": 8}, "rope_scaling is 8; give rope_type and its parameters, or null"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings is 1.5; give a whole number above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; give true or false"),
        ({"rope_scaling": None, "rope_parameters": None}, "two names of one thing"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason(override: dict[str, Any], words: str) -> None:
    fault = override_fault(override)
    assert fault is not None and words in fault


def test_the_recipe_names_the_field(small: Path) -> None:
    (line,) = faults(small, "model.override_config.hidden_size=16")
    assert line.startswith("  model.override_config = {'hidden_size': 16}: hidden_size cannot be changed: it")
    recipe = load(small, ["model.override_config.rope_theta=5.0e6"])
    assert recipe.model.override_config == {"rope_theta": 5e6}
    assert recipe.override_of(recipe.model.folder) == {"rope_theta": 5e6} and recipe.override_of("other") == {}


def test_the_shape_is_that_of_the_changed_file(tiny_model: Any) -> None:
    folder = tiny_model(num_layers=2)
    shape = read_model_shape(folder, {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 4096})
    plain = read_model_shape(folder)
    assert (shape.rotary, shape.max_position_embeddings) == (Rotary(5e5, "llama3", 8.0, 8192.0), 4096)
    assert plain.rotary != shape.rotary and shape.hidden_size == plain.hidden_size
    with pytest.raises(DataError, match=r"config\.json with model\.override_config = .*rope_type longrope is not"):
        read_model_shape(folder, {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}})


@pytest.mark.parametrize("field", [{"num_experts_per_tok": 4}, {"norm_topk_prob": True}])
def test_a_dense_model_has_no_experts_to_choose(tiny_model: Any, field: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(field))} has no effect, because the model has no experts"):
        read_model_shape(tiny_model(num_layers=2), field)


def test_a_critic_of_another_folder_has_its_own_config() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "data": {"train": "t"}, "algorithm": {"preset": "ppo"},
            "model": {"path": "m", "override_config": {"rope_theta": 5e5}}, "critic": {"path": "c"},
        }
    )  # fmt: skip
    assert [bool(recipe.override_of(folder)) for folder in ("m", *recipe.further_models.values())] == [True, False]
