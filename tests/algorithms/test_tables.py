from ast import unparse
from inspect import Parameter, signature
from pathlib import Path
from typing import get_args

import pytest

from megarl.algorithms.advantages import ADVANTAGES, gae, rae
from megarl.algorithms.divergences import DIVERGENCES, TAILS
from megarl.algorithms.importance import IMPORTANCE_SAMPLING
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.algorithms.reduction import AGGREGATIONS
from megarl.config import AlgorithmConfig, DistillationConfig
from megarl.config.formulas import formulas
from megarl.config.sections.learning import PRESETS


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("algorithm.advantage", ADVANTAGES | {"gae": gae, "rae": rae}),
        ("algorithm.policy_loss", POLICY_LOSSES),
        ("algorithm.importance_sampling", IMPORTANCE_SAMPLING),
        ("preference.loss", PREFERENCE_LOSSES),
        ("distillation.divergence", DIVERGENCES),
    ],
)
def test_what_the_source_tells_of_a_table_is_what_the_functions_take(field, table):
    expected = {
        name: {
            parameter.name: (str(parameter.annotation), parameter.default is Parameter.empty)
            for parameter in signature(function).parameters.values()
            if parameter.kind is Parameter.KEYWORD_ONLY
        }
        for name, function in table.items()
    }
    found = {
        name: {keyword: (unparse(told.annotation), told.is_required) for keyword, told in keywords.items()}
        for name, keywords in formulas(field).items()
    }
    assert found == expected


@pytest.mark.parametrize(("field", "table"), [("aggregation", AGGREGATIONS), ("kl_estimator", KL_ESTIMATORS)])
def test_the_recipe_offers_what_the_table_holds(field, table):
    assert set(get_args(AlgorithmConfig.model_fields[field].annotation)) == set(table)


def test_the_recipe_offers_the_tails():
    assert set(get_args(DistillationConfig.model_fields["tail"].annotation)) == set(TAILS)


def test_the_recipe_offers_the_presets():
    offered, _ = get_args(AlgorithmConfig.model_fields["preset"].annotation)
    assert set(get_args(offered)) == set(PRESETS)


@pytest.mark.parametrize("name", sorted({*PRESETS, *ADVANTAGES, *POLICY_LOSSES, "rae"} - {"clipped"}))
def test_the_guide_says_when_to_take_a_method(name):
    """`clipped` is the default loss."""
    guide = Path(__file__).parents[2] / "megarl/algorithms/README.md"
    choices, _, _ = guide.read_text(encoding="utf-8").partition("## Fields and defaults")
    assert f"`{name}`" in choices or f": {name}`" in choices


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_changed_field_by_field(name):
    config = AlgorithmConfig.model_validate({"preset": name, "kl_coefficient": 0.5})
    assert config.kl_coefficient == 0.5
    others = {field: value for field, value in PRESETS[name].items() if field != "kl_coefficient"}
    assert others and {field: getattr(config, field) for field in others} == others
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS, IMPORTANCE_SAMPLING, PREFERENCE_LOSSES])
def test_names_are_those_of_the_functions(table):
    assert all(function.__name__ == name for name, function in table.items())


@pytest.mark.parametrize(
    "table",
    [
        ADVANTAGES,
        ["gae", "rae"],
        POLICY_LOSSES,
        KL_ESTIMATORS,
        IMPORTANCE_SAMPLING,
        PREFERENCE_LOSSES,
        PRESETS,
        AGGREGATIONS,
    ],
)
def test_the_guide_names_them(table):
    guide = (Path(__file__).parents[2] / "launch/recipes/README.md").read_text(encoding="utf-8")
    assert [name for name in table if f"`{name}`" not in guide] == []
