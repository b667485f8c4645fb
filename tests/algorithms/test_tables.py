from pathlib import Path
from types import NoneType
from typing import get_args

import pytest

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.importance import IMPORTANCE_SAMPLING
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.algorithms.reduction import AGGREGATIONS
from megarl.config import AlgorithmConfig, PreferenceConfig
from megarl.config.learning import PRESETS


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("advantage", [*ADVANTAGES, "gae"]), ("policy_loss", POLICY_LOSSES), ("aggregation", AGGREGATIONS),
        ("kl_estimator", KL_ESTIMATORS), ("importance_sampling", IMPORTANCE_SAMPLING), ("preset", PRESETS),
    ],
)  # fmt: skip
def test_the_recipe_offers_what_the_table_holds(field, table):
    kind = AlgorithmConfig.model_fields[field].annotation
    if NoneType in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    assert set(get_args(kind)) == set(table)


def test_the_recipe_offers_the_preference_losses():
    assert set(get_args(PreferenceConfig.model_fields["loss"].annotation)) == set(PREFERENCE_LOSSES)


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
    [ADVANTAGES, ["gae"], POLICY_LOSSES, KL_ESTIMATORS, IMPORTANCE_SAMPLING, PREFERENCE_LOSSES, PRESETS, AGGREGATIONS],
)
def test_the_readme_names_them(table):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in table if f"`{name}`" not in readme] == []
