"""Algorithms, rewards, staleness and evaluation whose settings do not fit each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight import check, kept_kv, uncorrected_staleness
from megarl.rollout.accuracy import unjudged_text
from megarl.types import ConfigError

PPO = {"preset": "ppo"}
RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
TWO_ENGINES = SEPARATE | {"ranks": 2}

UNJUDGED = {"functions": ["boxed_of_mine.py:exact", "boxed_of_mine.py:brevity"]}
"""Functions of the user's, none of which says that it judges the answer."""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param(
            {"trackers": ["tensorbord"]},
            ["trackers: unknown tracker 'tensorbord'", "Did you mean 'tensorboard'?"],
            id="tracker",
        ),
        pytest.param(
            {"reward": {"functions": ["boxed", "think_answer_tags", "boxed"]}},
            ["reward.functions = ['boxed', 'think_answer_tags', 'boxed']", "boxed is listed twice"],
            id="a reward twice",
        ),
        pytest.param(
            {"algorithm": {"importance_sampling": "icepop", "old_logprobs": "rollout"}},
            ["algorithm.importance_sampling = icepop", "set algorithm.old_logprobs=trainer"],
            id="importance_sampling",
        ),
        pytest.param(
            {"rollout": {"stragglers": "abort"}},
            ["rollout.stragglers = abort", "set algorithm.oversampling=1.5"],
            id="no surplus",
        ),
        pytest.param(
            {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 2.0}},
            ["rollout.stragglers = park", "set algorithm.importance_sampling=tis"],
            id="stragglers without a correction",
        ),
        pytest.param(
            {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 3.0, "importance_sampling": "tis"}},
            ["algorithm.oversampling = 3.0", "use at most 2"],
            id="more stragglers than a step trains on",
        ),
        pytest.param(
            {
                "rollout": {"stragglers": "park", "max_staleness": 0},
                "algorithm": {"oversampling": 2.0, "importance_sampling": "tis"},
            },
            ["rollout.max_staleness = 0", "set 1, or rollout.stragglers=wait"],
            id="parked for nothing",
        ),
        pytest.param(
            {"cluster": RANKS_4, "rollout": TWO_ENGINES | {"max_staleness": 2}},
            ["rollout.placement = separate", "rollout.max_staleness = 2", "set algorithm.importance_sampling=tis"],
            id="staleness without a correction",
        ),
        pytest.param(
            {
                "cluster": RANKS_4,
                "rollout": TWO_ENGINES | {"max_staleness": 2, "sync_every": 4},
                "algorithm": {"importance_sampling": "tis"},
            },
            [
                "rollout.max_staleness = 2",
                "rollout.sync_every = 4",
                "up to 3 weight versions old",
                "set it to at least 3",
            ],
            id="staler than the bound before the next reshard",
        ),
        pytest.param(
            {"algorithm": {"importance_sampling": "icepop", "importance_sampling_low": 3.0}},
            ["algorithm.importance_sampling_low = 3.0: set it below algorithm.importance_sampling_high = 2.0"],
            id="icepop",
        ),
        pytest.param(
            {"algorithm": {"advantage": "pass_at_k", "pass_k": 9}}, ["algorithm.pass_k = 9: exceeds"], id="pass at k"
        ),
        pytest.param(
            {"algorithm": {"dynamic_sampling": [0.9, 0.1]}},
            ["algorithm.dynamic_sampling = [0.9, 0.1]: give two accuracies"],
            id="filter range",
        ),
        pytest.param(
            {"algorithm": {"dynamic_sampling": [0.5, 0.9], "dynamic_sampling_metric": "reward"}},
            ["algorithm.dynamic_sampling = [0.5, 0.9]", "algorithm.dynamic_sampling_metric = reward", "write [0.5, 1]"],
            id="spread with an upper bound",
        ),
        pytest.param(
            {"reward": UNJUDGED, "algorithm": {"preset": "dapo", "dynamic_sampling_metric": "accuracy"}},
            ["algorithm.dynamic_sampling_metric = accuracy", "judges_answer: true"],
            id="DAPO by an accuracy that nothing measures",
        ),
        pytest.param(
            {"reward": UNJUDGED, "algorithm": {"dynamic_sampling": [0.2, 0.8]}},
            ["algorithm.dynamic_sampling = [0.2, 0.8]: needs accuracy", "judges_answer: true"],
            id="a range of accuracies that nothing measures",
        ),
        pytest.param(
            {"reward": UNJUDGED, "data": {"curriculum": {"band": [0.1, 0.9]}}},
            ["data.curriculum.band = [0.1, 0.9]: needs accuracy", "judges_answer: true"],
            id="a curriculum without verdicts",
        ),
        pytest.param(
            {"reward": UNJUDGED, "algorithm": {"advantage": "pass_at_k"}},
            ["algorithm.advantage = pass_at_k: needs accuracy", "judges_answer: true"],
            id="pass_at_k without verdicts",
        ),
        pytest.param(
            {"train": {"samples_per_prompt": 1}}, ["train.samples_per_prompt = 1", "use 2 or more"], id="group"
        ),
        pytest.param({"reward": {"functions": []}}, ["reward.functions is empty"], id="nothing is right"),
        pytest.param(
            {"reward": {"functions": ["a.b:c", "d/e.py:c"]}},
            ["a.b:c and d/e.py:c would have the same metric reward/c/mean"],
            id="two functions of one name",
        ),
        pytest.param(
            {"algorithm": PPO, "critic": {"warmup_steps": 10}, "train": {"steps": 10}},
            ["critic.warmup_steps = 10: no step of train.steps 10 would train the policy"],
            id="nothing but warm-up",
        ),
        pytest.param(
            {"algorithm": PPO, "critic": {"updates_per_step": 3}},
            ["critic.updates_per_step = 3", "256 completions", "use 1, 2, 4"],
            id="critic's updates",
        ),
        pytest.param(
            {"rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0}}},
            ["temperature = 0"],
            id="greedy rollout",
        ),
        pytest.param(
            {"rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0.004}}},
            ["rollout.sampling.temperature = 0.004", "0.01"],
            id="a temperature that the engine raises",
        ),
        pytest.param(
            {
                "algorithm": {"overlong_buffer": 12},
                "rollout": {
                    "environment": "calculator",
                    "sampling": {"max_new_tokens": 24},
                    "budget": {"sampled_tokens": 10},
                },
            },
            ["algorithm.overlong_buffer = 12", "rollout.budget.sampled_tokens 10"],
            id="a buffer as long as the budget",
        ),
        pytest.param(
            {"algorithm": {"reward_order": "normalize_then_sum"}},
            ["algorithm.reward_order = normalize_then_sum", "only one score, boxed", "leave this out"],
            id="one function to normalise",
        ),
        pytest.param(
            {
                "algorithm": {"reward_order": "normalize_then_sum", "overlong_buffer": 4},
                "reward": {"functions": ["boxed", "format"]},
            },
            ["algorithm.reward_order = normalize_then_sum", "algorithm.overlong_buffer", "function length"],
            id="a penalty beside normalised scores",
        ),
        pytest.param(
            {"algorithm": {"entropy_top_share": 0.2, "old_logprobs": "rollout"}},
            ["algorithm.entropy_top_share = 0.2", "set algorithm.old_logprobs=trainer"],
            id="entropies of no pass",
        ),
        pytest.param(
            {"evaluation": {"samples_per_prompt": 4, "k": [1, 8]}},
            ["evaluation.k = [1, 8]", "evaluation.samples_per_prompt 4; raise the latter to 8"],
            id="pass@k of more attempts than there are",
        ),
        pytest.param(
            {"evaluation": {"samples_per_prompt": 4, "sampling": {"temperature": 0.0}}},
            ["evaluation.samples_per_prompt = 4", "evaluation.sampling.temperature = 0"],
            id="equal attempts",
        ),
        pytest.param({"reward": {"functions": ["bxed"]}}, ["reward.functions", "'bxed'", "'boxed'"], id="reward"),
    ],
)
def test_each_misfit_is_one_line_with_field_value_and_remedy(
    only_fault: Callable[..., str], changed: dict[str, Any], told: list[str]
) -> None:
    line = only_fault(**changed)
    assert all(words in line for words in told), line


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
    [told] = uncorrected_staleness(base)
    assert base.algorithm.importance_sampling is None and "up to rollout.max_staleness = 2 versions old" in told
    for corrected in ({"importance_sampling": "tis"}, {"old_logprobs": "rollout"}):
        made = recipe(cluster=RANKS_4, rollout=rollout, algorithm=surplus | corrected)
        check(made)
        assert [*uncorrected_staleness(made)] == []
    assert [*kept_kv(base)] == []
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
