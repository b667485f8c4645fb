"""Algorithms, rewards, staleness and evaluation whose settings do not fit each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight import check, warn_of_kept_kv, warn_of_uncorrected_staleness
from megarl.rollout.accuracy import unjudged_text
from megarl.types import ConfigError

PPO = {"preset": "ppo"}
RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
TWO_ENGINES = SEPARATE | {"ranks": 2}

UNJUDGED = {"functions": ["boxed_of_mine.py:exact", "boxed_of_mine.py:brevity"]}
"""Functions of the user's, none of which says that it judges the answer."""


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"loop": "sft", "train": {"samples_per_prompt": 1}}, id="no group in sft"),
        pytest.param({"algorithm": PPO, "train": {"samples_per_prompt": 1}}, id="no group with a critic"),
    ],
)
def test_the_limits_themselves_are_allowed(recipe: Callable[..., Recipe], changed: dict[str, Any]) -> None:
    assert check(recipe(**changed)).world_size == 1


def test_one_sample_a_prompt_is_sound_where_it_keeps_its_reward(recipe: Callable[..., Recipe]) -> None:
    check(recipe(train={"samples_per_prompt": 1}, algorithm={"lone_sample": "reward"}))


@pytest.mark.parametrize(
    "rollout",
    [TWO_ENGINES | {"max_staleness": 2}, {"stragglers": "park", "max_staleness": 2}],
    ids=["separate", "park"],
)
def test_stale_tokens_go_uncorrected_only_where_that_is_written(
    recipe: Callable[..., Recipe], rollout: dict[str, Any]
) -> None:
    surplus = {} if "placement" in rollout else {"oversampling": 2.0}
    base = recipe(cluster=RANKS_4, rollout=rollout, algorithm={**surplus, "importance_sampling": "none"})
    check(base)
    [told] = warn_of_uncorrected_staleness(base)
    assert base.algorithm.importance_sampling is None and "up to rollout.max_staleness = 2 versions old" in told
    dro = {"policy_loss": "dro", "policy_loss_kwargs": {"beta": 0.1}, "old_logprobs": "rollout"}
    of_engine = ({"old_logprobs": "rollout"}, {"preset": "dppo_kl"}, {"preset": "vespo"}, dro)
    for corrected in ({"importance_sampling": "tis"}, *of_engine):
        made = recipe(cluster=RANKS_4, rollout=rollout, algorithm=surplus | corrected)
        check(made)
        assert [*warn_of_uncorrected_staleness(made)] == []
    assert [*warn_of_kept_kv(base)] == []
    unclipped = {"old_logprobs": "rollout", "policy_loss": "policy_gradient"}
    with pytest.raises(ConfigError, match="nothing corrects for it"):
        check(recipe(cluster=RANKS_4, rollout=rollout, algorithm=surplus | unclipped))


def test_a_run_of_no_steps_needs_something_to_evaluate(recipe: Callable[..., Recipe]) -> None:
    sound = recipe()
    with pytest.raises(
        ConfigError, match=r"train\.steps = 0: the run would only evaluate, but data\.validation is missing"
    ):
        check(recipe(train={"steps": 0}))
    check(recipe(train={"steps": 0}, data={"validation": {"held_out": sound.data.train}}))


def test_an_old_name_of_a_metric_is_refused_with_the_new_one(recipe: Callable[..., Recipe]) -> None:
    train = recipe().data.train
    made = recipe(data={"validation": {"a": train}}, checkpoint={"best": "rollout/kept"})
    with pytest.raises(ConfigError, match=r"checkpoint\.best = rollout/kept .*rollout/groups_passing_filter"):
        check(made)


@pytest.mark.parametrize(
    ("measure", "function", "told"),
    [
        ("reward/mean", "length", None),
        ("reward/mean/low", "boxed", None),
        ("acc", "boxed", "measured are reward/mean, accuracy"),
        ("majority_at_4", "code", "take pass_at_K"),
        ("pass_at_8", "boxed", "put 8 into evaluation.k"),
        ("reward/code/passed", "boxed", "measured are reward/mean, accuracy"),
        ("accuracy/low", "boxed", None),
        ("accuracy", "length", "judges_answer: true"),
        ("pass_at_4/low", "length", "judges_answer: true"),
        ("majority_at_4", "length", "judges_answer: true"),
        ("majority_at_4", "multiple_choice", None),
        ("reward/code/passed", "code", None),
        ("data_source/org_a/pass_at_4", "boxed", None),
    ],
)
def test_the_best_model_is_chosen_by_what_is_measured(
    recipe: Callable[..., Recipe], measure: str, function: str, told: str | None
) -> None:
    evaluation = {"samples_per_prompt": 4, "sampling": {"temperature": 1.0}}
    train = recipe().data.train
    made = recipe(
        data={"validation": {"a": train}},
        evaluation=evaluation,
        checkpoint={"best": f"val/a/{measure}"},
        reward={"functions": [function]},
    )
    if told is None:
        check(made)
        return
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert f"checkpoint.best = val/a/{measure}" in str(caught.value) and told in str(caught.value)


def test_a_rollback_needs_checkpoints(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"train.on_spike = rollback: .*set checkpoint.every_steps"):
        check(recipe(train={"on_spike": "rollback"}))
    check(recipe(train={"on_spike": "rollback"}, checkpoint={"every_steps": 10}))


def test_dapo_filters_continuous_rewards_by_their_spread(recipe: Callable[..., Recipe]) -> None:
    for reward in (UNJUDGED, {"functions": ["boxed_of_mine.py:graded"]}):
        check(recipe(reward=reward, algorithm={"preset": "dapo"}))
        check(recipe(reward=reward, algorithm={"preset": "dapo", "dynamic_sampling_metric": "reward"}))


def test_a_start_says_once_that_there_is_no_accuracy(recipe: Callable[..., Recipe]) -> None:
    told = unjudged_text(recipe(reward=UNJUDGED, algorithm={"preset": "dapo"}), "single_turn")
    assert told is not None and "judges_answer: true" in told and "algorithm.dynamic_sampling" in told
    assert unjudged_text(recipe(), "single_turn") is None
    assert unjudged_text(recipe(reward={"functions": ["mine.py:exact"]}), "single_turn") is None
    assert unjudged_text(recipe(reward=UNJUDGED, rollout={"environment": "guess_number"}), "guess_number") is None
