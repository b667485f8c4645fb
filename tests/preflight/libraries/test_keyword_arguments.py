"""Keyword arguments of advantages and losses, and functions of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight.libraries.keyword_arguments import check_keywords

OWN = """
def loss(policy_logprobs, old_logprobs, advantages, *, clip_high: float, tau: float, mode: str = "a"):
    return -advantages * policy_logprobs * min(tau, clip_high), {}


def of_sequences(policy_logprobs, old_logprobs, advantages, cu_seqlens, mask, *, clip_low=0.1):
    assert len(cu_seqlens) == 4 and cu_seqlens[-1] == len(mask) == len(policy_logprobs) and clip_low == 0.3
    return -advantages * policy_logprobs, {"trained": mask.float()}


def open_to_all(policy_logprobs, old_logprobs, advantages, **settings):
    assert settings == {"anything": 1}
    return -advantages * policy_logprobs, {}


def of_two(policy_logprobs, advantages):
    ...


def advantage(rewards, groups, *, passes, lengths, k, scale: float = 1.0):
    assert passes.shape == lengths.shape == rewards.shape == groups.shape and k == 4
    return (rewards - rewards.mean()).double() * scale


def loss_alone(policy_logprobs, old_logprobs, advantages):
    return -advantages * policy_logprobs


def with_ratio(policy_logprobs, old_logprobs, advantages):
    return -advantages * policy_logprobs, {"ratio": (policy_logprobs - old_logprobs).exp().detach()}


def one_number(policy_logprobs, old_logprobs, advantages):
    return (-advantages * policy_logprobs).sum(), {}


def whole_metric(policy_logprobs, old_logprobs, advantages):
    return -advantages * policy_logprobs, {"ratio": policy_logprobs.exp().mean()}


def detached(policy_logprobs, old_logprobs, advantages):
    return -advantages * policy_logprobs.detach(), {}


def root(policy_logprobs, old_logprobs, advantages):
    return -advantages * (policy_logprobs - old_logprobs).sqrt(), {}


def raising(policy_logprobs, old_logprobs, advantages):
    return policy_logprobs @ advantages[1:], {}


def by_deviation(rewards, groups):
    grouped = rewards.view(2, -1)
    return ((grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)).flatten()


def of_groups(rewards, groups):
    return rewards.view(2, -1).mean(1)


def in_float32(rewards, groups):
    return rewards - rewards.float().new_zeros(2).index_add_(0, groups, rewards)[groups]


def listed(rewards, groups):
    return rewards.tolist()
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def told(loop: str = "rl", **sections: Any) -> list[str]:
    made = {"name": "x", "loop": loop, "model": {"path": "m"}, "data": {"train": "t"}} | sections
    return [*check_keywords(Recipe.model_validate(made))]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"policy_loss": "sapo", "policy_loss_kwargs": {"temperature_positive": 2}}, id="sapo"),
        pytest.param({"advantage": "grpo", "advantage_kwargs": {"epsilon": 1e-4}}, id="grpo's epsilon"),
        pytest.param({"policy_loss": "own.py:loss", "policy_loss_kwargs": {"tau": 0.5}, "clip_high": 0.3}, id="own"),
        pytest.param({"policy_loss": "own.py:of_sequences", "clip_low": 0.3}, id="own of sequences"),
        pytest.param({"policy_loss": "own.py:open_to_all", "policy_loss_kwargs": {"anything": 1}}, id="own, any"),
        pytest.param({"advantage": "own.py:advantage", "advantage_kwargs": {"scale": 2.0}}, id="own advantage"),
    ],
)
def test_what_functions_take(algorithm: dict[str, Any]) -> None:
    assert told(algorithm=algorithm) == []


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        pytest.param(
            {"policy_loss": "sapo", "policy_loss_kwargs": {"temperature_positiv": 2.0}},
            [
                "algorithm.policy_loss_kwargs.temperature_positiv = 2.0: sapo takes no such keyword",
                "did you mean temperature_positive? known are temperature_positive, temperature_negative",
            ],
            id="misspelt",
        ),
        pytest.param(
            {"policy_loss_kwargs": {"tau": 1}},
            ["algorithm.policy_loss_kwargs.tau = 1: clipped takes no such keyword; it takes none; leave this out"],
            id="of a loss without any",
        ),
        pytest.param(
            {"policy_loss": "sapo", "policy_loss_kwargs": {"temperature_positive": "warm"}},
            ["temperature_positive = 'warm': sapo has the type float"],
            id="type",
        ),
        pytest.param(
            {"policy_loss": "sapo", "policy_loss_kwargs": {"temperature_positive": None}},
            ["temperature_positive = None: sapo has the type float"],
            id="nothing",
        ),
        pytest.param(
            {"policy_loss_kwargs": {"clip_low": 0.1}},
            ["clip_low = 0.1: this keyword is a recipe field of its own; set algorithm.clip_low"],
            id="a field's keyword",
        ),
        pytest.param(
            {"advantage": "opo", "advantage_kwargs": {"lengths": 3}},
            ["algorithm.advantage_kwargs.lengths = 3: the run computes this keyword"],
            id="measured",
        ),
        pytest.param(
            {"importance_sampling": "tis", "importance_sampling_kwargs": {"cap": 2.0}},
            ["algorithm.importance_sampling_kwargs.cap = 2.0: tis takes no such keyword"],
            id="correction",
        ),
        pytest.param(
            {"policy_loss": "own.py:loss"},
            ["algorithm.policy_loss_kwargs.tau: missing; own.py:loss needs it"],
            id="own needs one",
        ),
        pytest.param(
            {"policy_loss": "own.py:loss", "policy_loss_kwargs": {"tau": 1, "mode": 2}},
            ["algorithm.policy_loss_kwargs.mode = 2: own.py:loss has the type str"],
            id="own, type",
        ),
        pytest.param(
            {"policy_loss": "own.py:loss", "policy_loss_kwargs": {"tau": 1}, "clip_low": 0.1},
            ["algorithm.clip_low = 0.1: has no effect with algorithm.policy_loss=own.py:loss, which has no keyword"],
            id="own takes no clip_low",
        ),
        pytest.param(
            {"policy_loss": "own.py:of_two"},
            [
                "algorithm.policy_loss = own.py:of_two: its signature is (policy_logprobs, advantages)",
                "Define it as: def of_two(policy_logprobs, old_logprobs, advantages, *, ...) -> tuple[Tensor, dict",
            ],
            id="own, too few tensors",
        ),
        pytest.param(
            {"policy_loss": "absent.py:loss"},
            ["algorithm.policy_loss: 'absent.py:loss': cannot import absent.py: FileNotFoundError"],
            id="no file",
        ),
        pytest.param(
            {"advantage": "own.py:advantge"},
            ["algorithm.advantage: 'own.py:advantge': module own.py has no function", "did you mean 'advantage'?"],
            id="no function",
        ),
    ],
)
def test_what_functions_do_not_take(algorithm: dict[str, Any], words: list[str]) -> None:
    [line] = told(algorithm=algorithm)
    assert all(text in line for text in words), line


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        pytest.param({"policy_loss": "own.py:loss_alone"}, ["returned a tensor [9] of float32; return (loss, "]),
        pytest.param({"policy_loss": "own.py:one_number"}, ["a tensor [] of float32 as loss, for 9 tokens"]),
        pytest.param({"policy_loss": "own.py:whole_metric"}, ["a tensor [] of float32 as metric 'ratio'"]),
        pytest.param({"policy_loss": "own.py:detached"}, ["a loss without gradient"]),
        pytest.param({"policy_loss": "own.py:root"}, ["not finite as loss"]),
        pytest.param({"policy_loss": "own.py:raising"}, ["RuntimeError", "own.py, line ", "advantages a tensor [9]"]),
        pytest.param({"advantage": "own.py:by_deviation"}, ["nan", "where the rewards of a group are equal"]),
        pytest.param({"advantage": "own.py:of_groups"}, ["a tensor [2] of float64, for 16 samples; return a float"]),
        pytest.param({"advantage": "own.py:in_float32"}, ["RuntimeError", "rewards a tensor [16] of float64"]),
        pytest.param({"advantage": "own.py:listed"}, ["returned list [0.0, 1.0, ", "for 16 samples"]),
    ],
)
def test_a_call_on_toy_tensors_shows_what_a_function_returns(algorithm: dict[str, Any], words: list[str]) -> None:
    [line] = told(algorithm=algorithm)
    [(field, name)] = algorithm.items()
    assert line.startswith(f"algorithm.{field} = {name}: the function r")
    assert all(text in line for text in words), line


def test_a_limit_of_the_ratio_needs_it_from_an_own_loss() -> None:
    algorithm = {"policy_loss": "own.py:open_to_all", "policy_loss_kwargs": {"anything": 1}, "skip_ratio": 20}
    [line] = told(algorithm=algorithm)
    assert line.startswith("algorithm.policy_loss = own.py:open_to_all: the function returned no metric 'ratio'")
    assert "algorithm.skip_ratio" in line
    assert told(algorithm={"policy_loss": "own.py:with_ratio", "skip_ratio": 20}) == []
    assert told(algorithm={"skip_ratio": 20}) == []


def test_keywords_of_a_preference_loss() -> None:
    assert told("preference", preference={"loss": "ipo", "beta": 0.2}) == []
    [line] = told("preference", preference={"loss": "kto", "loss_kwargs": {"kl": 0.1}})
    assert line == "preference.loss_kwargs.kl = 0.1: the run computes this keyword from its samples; leave it out"


def test_nothing_is_imported_for_another_loop() -> None:
    assert told("sft", algorithm={"policy_loss": "absent.py:loss"}) == []
