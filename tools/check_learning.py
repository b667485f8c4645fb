"""Train each method's recipe on a tiny model and show what it learned: accuracy before and after, one line each.

    python tools/check_learning.py [--only dapo --only gspo] [--json results.jsonl]

First a hasty student is made, as in the quickstart: a tiny model with random weights that imitates short answers to
arithmetic. Each method then starts from it, with the same data, seeds and steps on two CPU ranks. What learns from
preferences is measured by the held-out pairs that it wins. Environments that megarl ships are methods here too: games
start from a player that mostly guesses at random, tools from a student that seldom calls them. Exits with 1 if a method
fails or gains less than its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LEAST_GAIN = 0.15
LEAST_WON = 0.9
"""Share of held-out pairs."""
ROOT = Path(__file__).resolve().parents[1]
STUDENT = ROOT / "launch/recipes/quickstart_sft.yaml"
RECIPES = {
    name: ROOT / f"launch/recipes/tiny_{name}.yaml" for name in ("rl", "ppo", "lora", "preference", "reward_model")
}
RECIPES["sft"] = STUDENT
RECIPES["tools"] = ROOT / "launch/recipes/tiny_tools.yaml"
TOOL_STUDENT = ROOT / "launch/recipes/tiny_tools_sft.yaml"
BY_PAIRS = ("preference", "reward_model")
"""Recipes whose held-out accuracy is a share of pairs."""
REWARD_MODEL = "runs/tiny_reward_model/hf"
UNTAUGHT = ("model.path=runs/quickstart_input/model", "optimizer.learning_rate=2e-3", "train.steps=120")
PLAYER, SEARCHER = "player", "searcher"
"""Runs of imitation that make the models with which games and searches begin."""
PLAYER_DATA = "runs/player_input/data"
_ARITHMETIC = (
    "{operators: ['+', '-'], allow_parentheses: false, allow_negation: false, min_terms: 3, max_terms: 4, "
    "min_digits: 1, max_digits: 1}"
)
"""Of reasoning-gym's task, as tools/make_dataset.py has it for the student."""


def game(name: str, *, steps: int = 32, learning_rate: float = 1e-3, **settings: int) -> tuple[str, ...]:
    """Recipe and overrides of a game from the player's model; what it draws is measured, no greedy play."""
    return (
        "rl", f"model.path=runs/{PLAYER}/hf", "data.train=environment:2000",
        "data.validation.heldout=environment:200", "data.max_prompt_tokens=128", "train.prompts_per_step=32",
        f"train.steps={steps}", f"optimizer.learning_rate={learning_rate}", "optimizer.min_learning_rate=1e-4",
        "rollout.sampling.max_new_tokens=64", "evaluation.sampling.temperature=1", f"rollout.environment={name}",
        *(f"rollout.environment_kwargs.{field}={value}" for field, value in settings.items()),
    )  # fmt: skip


METHODS: dict[str, tuple[str, ...]] = {
    "grpo": ("rl", "algorithm.preset=grpo"),
    "dr_grpo": ("rl", "algorithm.preset=dr_grpo"),
    "dapo": ("rl", "algorithm.preset=dapo", "algorithm.oversampling=1.5"),
    "rloo": ("rl", "algorithm.preset=rloo"),
    "reinforce_plus_plus": ("rl", "algorithm.preset=reinforce_plus_plus"),
    "gspo": ("rl", "algorithm.preset=gspo", "train.updates_per_step=2"),
    "cispo": ("rl", "algorithm.preset=cispo", "train.updates_per_step=2"),
    "opo": ("rl", "algorithm.advantage=opo"),
    "gmpo": ("rl", "algorithm.policy_loss=gmpo", "algorithm.clip_low=0.4", "algorithm.clip_high=0.4"),
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
    "simpo": ("preference", "preference.loss=simpo", "preference.beta=2", "preference.margin=1", *UNTAUGHT),
    "orpo": ("preference", "preference.loss=orpo", *UNTAUGHT),
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


def megarl(folder: Path, recipe: Path, *overrides: str) -> tuple[int, str]:
    """One run in a folder: exit status and what it said."""
    command = [sys.executable, "-m", "megarl", "train", str(recipe), *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def accuracies(run: Path) -> list[float]:
    """Held-out accuracy at each evaluation of a run, in order."""
    steps = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [value for step in steps for name, value in step.items() if name == "val/heldout/accuracy"]


START = "quickstart_sft"
"""The run whose model a method starts with, where it is not another of those below."""


def start_of(name: str) -> str:
    """The run whose model a method starts with."""
    recipe, *overrides = METHODS[name]
    own = [run for run in (PLAYER, SEARCHER) if f"model.path=runs/{run}/hf" in overrides]
    return own[0] if own else "tiny_tools_sft" if recipe == "tools" else START


def make_start(folder: Path, run: str) -> None:
    """The data and the model of one of the runs that methods start with. Raises SystemExit where that fails."""
    words = ("--tool-words",) if run != START else ()
    made = folder / "runs" / {START: "quickstart_input", "tiny_tools_sft": "tiny_tools_input"}.get(run, "player_input")
    data_tool = {START: "make_dataset.py", "tiny_tools_sft": "make_tool_data.py"}.get(run, "make_play_data.py")
    for tool, out, *flags in (
        ("make_tiny_model.py", "model", "--num-layers", "2", "--initializer-range", "0.08", *words),
        (data_tool, "data"),
    ):
        if not (made / out).is_dir():
            subprocess.run([sys.executable, str(ROOT / "tools" / tool), "--out", str(made / out), *flags], check=True)
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
    status, said = megarl(folder, TOOL_STUDENT if run in ("tiny_tools_sft", SEARCHER) else STUDENT, *overrides)
    if status:
        raise SystemExit(said)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=METHODS, help="check this method; repeatable")
    parser.add_argument("--work", type=Path, default=Path("runs/check_learning"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    for run in dict.fromkeys(start_of(name) for name in options.only or METHODS):
        if not (options.work / "runs" / run / "hf").is_dir():
            make_start(options.work, run)
    lines = []
    print(f"{'method':22}{'before':>8}{'after':>8}{'gain':>8}{'seconds':>9}")
    for name in options.only or METHODS:
        started = time.perf_counter()
        run = f"{name}-{time.strftime('%H%M%S')}"
        recipe, *overrides = METHODS[name]
        if any(REWARD_MODEL in override for override in overrides) and not (options.work / REWARD_MODEL).is_dir():
            megarl(options.work, RECIPES["reward_model"])
        status, said = megarl(options.work, RECIPES[recipe], f"name={run}", *overrides)
        seconds = time.perf_counter() - started
        if status:
            print(f"{name:22} failed with {status}: {said[-2000:]}")
            lines.append({"method": name, "met": False, "status": status})
            continue
        before, *_, after = accuracies(options.work / "runs" / run)
        met = after - before >= LEAST_GAIN and (recipe not in BY_PAIRS or after >= LEAST_WON)
        lines.append({"method": name, "before": before, "after": after, "seconds": round(seconds), "met": met})
        print(f"{name:22}{before:8.3f}{after:8.3f}{after - before:8.3f}{seconds:9.0f} {'' if met else '!'}", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    missed = sum(not line["met"] for line in lines)
    print(f"{len(lines)} methods, {missed} below the limits (gain {LEAST_GAIN}, pairs won {LEAST_WON})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
