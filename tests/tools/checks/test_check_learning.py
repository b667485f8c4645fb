"""The check of learning notices a method that did nothing."""

from __future__ import annotations

import pytest

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.config import AlgorithmConfig
from megarl.config.sections.learning import PRESETS
from tools.checks import learning

ALWAYS_ACT = {"grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "ppo"}
"""Presets of the check whose advantages differ from others in every step."""


@pytest.mark.parametrize(
    ("steps", "effect"),
    [
        ([{"train/sequence_weight": 1.0}, {"train/sequence_weight": 0.75}], 0.25),
        ([{"train/sequence_weight": 1.0}, {"train/sequence_weight": 1.5}], 0.5),
        ([{"train/sequence_weight": 1.0}], 0.0),
        # A renamed metric is no effect either.
        ([{"train/sequence_weights": 3.0}], 0.0),
    ],
)
def test_an_effect_is_the_largest_distance_from_the_value_without_one(
    steps: list[dict[str, float]], effect: float
) -> None:
    assert learning.measure_effect(steps, "vespo") == effect


def test_the_least_of_several_metrics_counts() -> None:
    steps = [{"covariance/penalised_share": 0.2, "kl/update": 0.0}, {"kl/update": 0.01}]
    assert learning.measure_effect(steps, "kl_cov") == 0.01
    assert learning.measure_effect(steps[:1], "kl_cov") == 0.0
    assert learning.measure_effect(steps, "grpo") is None


def test_each_method_that_limits_or_weighs_ratios_has_an_effect() -> None:
    """Such methods equal plain policy gradients while the policy has not moved."""
    presets, losses = set(), set()
    for name, (_, *overrides) in learning.METHODS.items():
        values = dict(override.removeprefix("algorithm.").split("=", 1) for override in overrides)
        preset = values.get("preset")
        loss = values.get("policy_loss") or PRESETS.get(preset or "", {}).get("policy_loss")
        if name in learning.EFFECTS:
            presets.add(preset)
            losses.add(loss)
    tried = {
        values[0].partition("=")[2] for _, *values in learning.METHODS.values() if values and "preset" in values[0]
    }
    assert tried - ALWAYS_ACT <= presets
    assert set(POLICY_LOSSES) - {"policy_gradient", "clipped"} <= losses
    assert AlgorithmConfig().policy_loss == "clipped"
