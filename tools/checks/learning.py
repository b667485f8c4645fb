"""Each method's recipe learns on a tiny model: accuracy before and after.

First a hasty student is made, as in the quickstart: a tiny model with random weights that imitates short answers to
arithmetic. Each method then starts from it, with the same data, seeds and steps on two CPU ranks. Preference methods
are measured by the share of held-out pairs that they win. Environments that megarl ships are methods here too: games
start from a player that mostly guesses at random, tools from a student that seldom calls them. A row per method and
seed; it fails if the run fails or gains less than its limit. With several seeds, a last row per method has their means.

A method that masks tokens, drops sequences or weighs ratios may never do so in a run, which then learns as without it.
The column `effect` is how far the method's metric was, in any step, from its value without effect (`EFFECTS`). A row
below `LEAST_EFFECT` fails. `grpo_updates` is `grpo` with as many updates a step as `dppo_tv` and others have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.make_dataset import make_dataset
from tools.make_play_data import make_play_data
from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import heldout_accuracies, read_metrics, train

DURATION = {"small": "155 s of CPU time", "full": "2572 s of CPU time (41 methods, one seed each)"}
SMALL = {"only": ["grpo"]}
LEAST_GAIN = 0.15
LEAST_WON = 0.9
"""Share of held-out pairs."""
STUDENT = "launch/recipes/quickstart_sft.yaml"
RECIPES = {name: f"launch/recipes/tiny_{name}.yaml" for name in ("rl", "ppo", "lora", "preference", "reward_model")}
RECIPES["sft"] = STUDENT
RECIPES["tools"] = "launch/recipes/tiny_tools.yaml"
TOOL_STUDENT = "launch/recipes/tiny_tools_sft.yaml"
BY_PAIRS = ("preference", "reward_model")
"""Recipes whose held-out accuracy is a share of pairs."""
REWARD_MODEL = "runs/tiny_reward_model/hf"
FROM_RANDOM_MODEL = ("model.path=runs/quickstart_input/model", "optimizer.learning_rate=2e-3", "train.steps=120")
PLAYER, SEARCHER = "player", "searcher"
"""Runs of imitation that make the models with which games and searches begin."""
PLAYER_DATA = "runs/player_input/data"
SEVERAL_UPDATES = "train.updates_per_step=8"
"""So that the policy of a step's last updates has moved away from the step's samples, and limits are reached."""
_ARITHMETIC = (
    "{operators: ['+', '-'], allow_parentheses: false, allow_negation: false, min_terms: 3, max_terms: 4, "
    "min_digits: 1, max_digits: 1}"
)
"""Settings of reasoning-gym's task, as tools/make_dataset.py has them for the student."""


def game(name: str, *, steps: int = 32, learning_rate: float = 1e-3, **settings: int) -> tuple[str, ...]:
    """Return recipe and overrides of a game, started from the player's model. Evaluations sample, at temperature 1."""
    return (
        "rl", f"model.path=runs/{PLAYER}/hf", "data.train=environment:2000",
        "data.validation.heldout=environment:200", "data.max_prompt_tokens=128", "train.prompts_per_step=32",
        f"train.steps={steps}", f"optimizer.learning_rate={learning_rate}", "optimizer.min_learning_rate=1e-4",
        "rollout.sampling.max_new_tokens=64", "evaluation.sampling.temperature=1", f"rollout.environment={name}",
        *(f"rollout.environment_kwargs.{field}={value}" for field, value in settings.items()),
    )  # fmt: skip


METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("rl", "algorithm.preset=grpo"),
    "grpo_updates": ("rl", "algorithm.preset=grpo", SEVERAL_UPDATES),
    "dr_grpo": ("rl", "algorithm.preset=dr_grpo"),
    "dapo": ("rl", "algorithm.preset=dapo", "algorithm.oversampling=1.5"),
    "rloo": ("rl", "algorithm.preset=rloo"),
    "reinforce_plus_plus": ("rl", "algorithm.preset=reinforce_plus_plus"),
    "gspo": ("rl", "algorithm.preset=gspo", "train.updates_per_step=2"),
    "cispo": ("rl", "algorithm.preset=cispo", SEVERAL_UPDATES),
    "luspo": ("rl", "algorithm.preset=luspo", "train.updates_per_step=2"),
    "dppo_tv": ("rl", "algorithm.preset=dppo_tv", SEVERAL_UPDATES),
    "dppo_kl": ("rl", "algorithm.preset=dppo_kl", SEVERAL_UPDATES),
    "vespo": ("rl", "algorithm.preset=vespo", "train.updates_per_step=2"),
    "dro": (
        "rl", "algorithm.policy_loss=dro", "algorithm.policy_loss_kwargs={beta: 0.1}", "train.updates_per_step=2",
    ),
    # Samples of the same step drift less than those of older policies, for which TRL's limit is 0.5 nats.
    "off_policy_limit": ("rl", "algorithm.off_policy_limit=0.05", "algorithm.old_logprobs=rollout", SEVERAL_UPDATES),
    "kl_unbiased": ("rl", "algorithm.kl_coefficient=0.05", "algorithm.kl_unbiased=true", SEVERAL_UPDATES),
    "clip_cov": ("rl", "algorithm.preset=clip_cov", "train.updates_per_step=2"),
    "kl_cov": ("rl", "algorithm.preset=kl_cov", "train.updates_per_step=2"),
    "maxrl": ("rl", "algorithm.advantage=maxrl"),
    "opo": ("rl", "algorithm.advantage=opo"),
    "gmpo": (
        "rl", "algorithm.policy_loss=gmpo", "algorithm.clip_low=0.4", "algorithm.clip_high=0.4", SEVERAL_UPDATES,
    ),
    "sapo": ("rl", "algorithm.policy_loss=sapo", "train.updates_per_step=2"),
    "pass_at_k": ("rl", "algorithm.advantage=pass_at_k"),
    "corrected": ("rl", "algorithm.importance_sampling=tis"),
    "partial": (
        "rl", "rollout.stragglers=park", "algorithm.oversampling=2", "algorithm.importance_sampling=tis",
    ),
    "ppo": ("ppo",),
    "ppo_reward_model": (
        "ppo", f"reward.model={REWARD_MODEL}", "reward.function_weight=0", f"critic.path={REWARD_MODEL}",
    ),
    "ppo_ptx": (
        "ppo", "data.ptx=runs/quickstart_input/data/sft.jsonl", "algorithm.ptx_coefficient=0.1",
    ),
    "sft": ("sft",),
    "reward_model": ("reward_model",),
    "lora": ("lora",),
    "dpo": ("preference",),
    "ipo": ("preference", "preference.loss=ipo"),
    # Without a reference the student's own likelihood decides, and it wins every pair before: the random model starts.
    "simpo": ("preference", "preference.loss=simpo", "preference.beta=2", "preference.margin=1", *FROM_RANDOM_MODEL),
    "orpo": ("preference", "preference.loss=orpo", *FROM_RANDOM_MODEL),
    "kto": (
        "preference", "preference.loss=kto", "data.train=runs/quickstart_input/data/judged.jsonl",
        "data.validation.heldout=runs/quickstart_input/data/heldout_judged.jsonl",
    ),
    # What tools/make_play_data.py plays.
    "guess_number": game("guess_number", max_number=3, max_guesses=2),
    "mastermind": game("mastermind", length=1, num_letters=2, max_guesses=2),
    "countdown": game("countdown", steps=64, learning_rate=2e-3, num_numbers=2, max_number=6),
    "reasoning_gym": (
        "rl", "data.train=environment:2000", "data.validation.heldout=environment:200",
        "rollout.environment=reasoning_gym", "rollout.environment_kwargs.task=basic_arithmetic",
        f"rollout.environment_kwargs.config={_ARITHMETIC}", "rollout.environment_kwargs.answer=boxed",
    ),
    "calculator": ("tools",),
    "search": (
        "tools", f"model.path=runs/{SEARCHER}/hf", f"data.train={PLAYER_DATA}/search_train.jsonl",
        f"data.validation.heldout={PLAYER_DATA}/search_heldout.jsonl", "rollout.environment=search",
        f"rollout.environment_kwargs={{corpus: {PLAYER_DATA}/corpus.jsonl, num_results: 1}}",
    ),
}  # fmt: skip
"""Name to recipe and overrides of it."""

CLIPPED = {"train/clip_fraction": 0.0}
# A loss that is smooth in the ratio differs from the plain one only where the ratio is not 1.
MOVED = {"kl/update": 0.0}
EFFECTS: dict[str, dict[str, float]] = {
    "grpo_updates": CLIPPED,
    "gspo": CLIPPED,
    "gmpo": CLIPPED,
    "cispo": CLIPPED,
    "luspo": CLIPPED,
    "sapo": MOVED,
    "dppo_tv": CLIPPED,
    "dppo_kl": CLIPPED,
    "vespo": {"train/sequence_weight": 1.0},
    "dro": MOVED,
    "off_policy_limit": {"train/off_policy_fraction": 0.0},
    # The ratio in the KL's gradient differs from 1 only where the policy has moved since the step's first update.
    "kl_unbiased": {"kl/reference": 0.0} | MOVED,
    "clip_cov": {"covariance/dropped_share": 0.0},
    "kl_cov": {"covariance/penalised_share": 0.0} | MOVED,
}
"""Name to metrics, each with its value in a step in which the method did not change the loss."""
LEAST_EFFECT = 5e-5
"""Log-probs of engine and trainer differ by up to 2e-5 in float32, so a smaller effect may be rounding."""


START = "quickstart_sft"
"""The run whose model a method starts with, where it is not another of those below."""


def start_of(name: str) -> str:
    """Return the name of the run whose model a method starts with."""
    recipe, *overrides = METHODS[name]
    start_runs = [run for run in (PLAYER, SEARCHER) if f"model.path=runs/{run}/hf" in overrides]
    return start_runs[0] if start_runs else "tiny_tools_sft" if recipe == "tools" else START


def make_start(folder: Path, run: str) -> None:
    """Make the data and the model of a run that methods start with. Raises SystemExit if training fails."""
    inputs, make_data = {
        START: ("quickstart_input", make_dataset),
        "tiny_tools_sft": ("tiny_tools_input", make_tool_data),
    }.get(run, ("player_input", make_play_data))
    input_folder = folder / "runs" / inputs
    if not (input_folder / "model").is_dir():
        make_tiny_model(input_folder / "model", num_layers=2, initializer_range=0.08, tool_words=run != START)
    if not (input_folder / "data").is_dir():
        write_data: Callable[[Path], Path] = make_data
        write_data(input_folder / "data")
    overrides = {
        PLAYER: (
            "data.validation.heldout=environment:50", "data.max_prompt_tokens=128", "rollout.environment=guess_number",
            "rollout.sampling.max_new_tokens=64", f"data.train={PLAYER_DATA}/sft.jsonl", "train.steps=150",
            "train.prompts_per_step=48",
        ),
        SEARCHER: (
            f"data.validation.heldout={PLAYER_DATA}/search_heldout.jsonl", "rollout.environment=search",
            f"rollout.environment_kwargs={{corpus: {PLAYER_DATA}/corpus.jsonl, num_results: 1}}",
            f"data.train={PLAYER_DATA}/search_sft.jsonl",
        ),
    }.get(run, ())  # fmt: skip
    if overrides:
        overrides = (f"name={run}", "model.path=runs/player_input/model", *overrides)
    train(TOOL_STUDENT if run in ("tiny_tools_sft", SEARCHER) else STUDENT, *overrides, folder=folder)


def check_method(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Train one method with one seed in a folder. Returns its row."""
    recipe, *overrides = METHODS[name]
    if any(REWARD_MODEL in override for override in overrides) and not (folder / REWARD_MODEL).is_dir():
        train(RECIPES["reward_model"], folder=folder)
    run_name = f"{name}-{seed}-{time.strftime('%H%M%S')}"
    try:
        seconds = train(RECIPES[recipe], f"name={run_name}", *overrides, f"seed={seed}", folder=folder)
    except SystemExit as failure:
        return {"method": name, "seed": seed, "failure": str(failure), "met": False}
    before, *_, after = heldout_accuracies(folder / "runs" / run_name)
    effect = measure_effect(read_metrics(folder / "runs" / run_name), name)
    has_effect = effect is None or effect >= LEAST_EFFECT
    return {
        "method": name,
        "seed": seed,
        "before": before,
        "after": after,
        "gain": after - before,
        "effect": "-" if effect is None else effect,
        "seconds": round(seconds),
        "failure": "none",
        "met": after - before >= LEAST_GAIN and (recipe not in BY_PAIRS or after >= LEAST_WON) and has_effect,
    }


def measure_effect(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return how far a method's metric is at most, in the steps' metrics, from its value without effect.

    Of several metrics the smallest such value counts. A metric that no step has counts as 0. None: the method has none.
    """
    effects = (
        max(abs(step.get(metric, neutral) - neutral) for step in steps)
        for metric, neutral in EFFECTS.get(name, {}).items()
    )
    return min(effects, default=None)


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a method's means over its seeds, with the least and the largest accuracy afterwards."""
    accuracies = [row["after"] for row in rows]
    means = {key: fmean(row[key] for row in rows) for key in ("before", "after", "gain")}
    return {"method": rows[0]["method"], "seed": "mean", **means, "least": min(accuracies), "most": max(accuracies)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=METHODS, help="check this method; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the runs of each method")
    parser.add_argument("--work", type=Path, default=Path("runs/check_learning"), help="folder of the runs")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    options.work.mkdir(parents=True, exist_ok=True)
    for start in dict.fromkeys(start_of(name) for name in options.only or METHODS):
        if not (options.work / "runs" / start / "hf").is_dir():
            make_start(options.work, start)
    for name in options.only or METHODS:
        rows = []
        for seed in options.seeds:
            rows.append(check_method(options.work, name, seed))
            yield rows[-1]
        if len(rows) > 1 and all("after" in row for row in rows):
            yield mean_row(rows)
