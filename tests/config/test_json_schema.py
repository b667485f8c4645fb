"""The JSON Schema of recipes accepts what megarl reads, and names wrong keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from megarl.config.recipe import load, to_yaml
from megarl.config.references.json_schema import recipe_schema
from megarl.config.schema import all_fields, description, section_of

RECIPES = sorted((Path(__file__).resolve().parents[2] / "launch/recipes").glob("*.yaml"))
LEAST = {"name": "a", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def wrong_places(validator: Draft202012Validator, recipe: Any) -> list[str]:
    """The dotted names at which the schema finds an error."""
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(recipe)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_as_written_and_in_full(path: Path, validator: Draft202012Validator) -> None:
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert wrong_places(validator, OmegaConf.to_container(OmegaConf.load(path))) == []
    # A run folder's config.yaml has all fields, so this tests the types of their defaults too.
    assert wrong_places(validator, yaml.safe_load(to_yaml(load(path)))) == []


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("trainer", {"tp": "${rollout.tp}", "pp": "???", "dp": None}),
        ("reward", {"functions": ["boxed", {"name": "exact", "weight": 0.5}, "${model.path}"]}),
        ("lora", {"targets": ["q_proj", "k_proj", "v_proj"]}),
        ("lora", {"targets": "all-linear"}),
        ("algorithm", {"overlong_buffer": 0, "importance_sampling": "none"}),
        ("data", {"train": "t.jsonl", "validation": {"easy": {"path": "e.jsonl", "fields": {"prompt": "q"}}}}),
    ],
)
def test_other_forms_of_a_value_are_valid(section: str, values: Any, validator: Draft202012Validator) -> None:
    assert wrong_places(validator, LEAST | {section: values}) == []


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"trainer": {"tpp": 2}}, "trainer"),
        ({"trainre": {"tp": 2}}, ""),
        ({"trainer": {"tp": 0}}, "trainer.tp"),
        ({"trainer": {"tp": True}}, "trainer.tp"),
        ({"trainer": {"tp": "two"}}, "trainer.tp"),
        ({"loop": "grpo"}, "loop"),
        ({"reward": {"functions": [{"name": "exact", "wight": 1}]}}, "reward.functions"),
        ({"model": {}}, "model"),
        ({"rollout": "${oc.env:ROLLOUT}"}, "rollout"),
    ],
)
def test_a_wrong_key_or_value_is_found_at_its_place(
    values: dict[str, Any], place: str, validator: Draft202012Validator
) -> None:
    assert wrong_places(validator, LEAST | values) == [place]


def test_a_mixture_needs_no_training_data_outside_its_sources(validator: Draft202012Validator) -> None:
    recipe = {name: value for name, value in LEAST.items() if name != "data"}
    assert wrong_places(validator, recipe | {"mixture": {"a": {"data": {"train": "t.jsonl"}}}}) == []


def test_each_field_has_its_description() -> None:
    schema = recipe_schema()
    for name, field in all_fields().items():
        if section_of(field) is not None:
            continue
        *sections, key = name.split(".")
        node: Any = schema
        for section in sections:
            node = schema["$defs"][node["properties"][section]["$ref"].rpartition("/")[2]]
        assert " ".join(node["properties"][key]["description"].split()) == description(field), name
