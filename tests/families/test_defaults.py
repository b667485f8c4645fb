"""Fields that config.json lacks have the value of transformers' configuration class, or are an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, shape_from_config
from megarl.types import DataError

ADDED = {
    # vLLM reads these, and transformers' classes do not have them.
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    # The class's own sizes rotate half of 42 channels.
    "glm4_moe": {"head_dim": 128},
}


def whole_config(family: str) -> dict[str, Any]:
    """Return a config.json with all fields of the family's class, each with the class's default."""
    fields = AutoConfig.for_model(family).to_dict()
    return {**fields, **ADDED.get(family, {}), "architectures": [FAMILIES[family].architecture]}


def sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config.json and the objects in it that the language model is read from."""
    text = config.get("text_config", config)
    yield config
    # Without this field YaRN has its own default, also where the class's whole setting has another value.
    text["rope_parameters"].pop("truncate", None)
    yield text["rope_parameters"]
    if text is not config:
        yield text


def read(config: dict[str, Any]) -> ModelShape:
    """Return the shape without a size that models with experts everywhere do not use."""
    shape = shape_from_config(config)
    return shape if shape.has_dense_layers else replace(shape, intermediate_size=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_is_the_family_s_default_or_an_error(family: str) -> None:
    whole = whole_config(family)
    parts = list(sections(whole))
    shape, defaults = read(whole), 0
    for section in parts:
        for field, value in list(section.items()):
            del section[field]
            try:
                assert read(whole) == shape, field
                defaults += 1
            except (DataError, KeyError):
                pass
            section[field] = value
    assert defaults > 10
