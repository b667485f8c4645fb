from typing import get_args

import pytest

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.reduction import AGGREGATIONS
from megarl.config import AlgorithmConfig


@pytest.mark.parametrize(
    ("field", "table"),
    [("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES), ("aggregation", AGGREGATIONS)],
)
def test_the_recipe_offers_what_the_table_holds(field, table):
    assert set(get_args(AlgorithmConfig.model_fields[field].annotation)) == set(table)


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS])
def test_names_are_those_of_the_functions(table):
    assert all(function.__name__ == name for name, function in table.items())
