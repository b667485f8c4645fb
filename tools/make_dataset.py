"""Make JSONL data sets from a procedural task of reasoning-gym: fine-tuning, training and held-out.

    megarl make arithmetic --out runs/arithmetic --task basic_arithmetic --sft 3000 --train 2400 --heldout 200

Writes three files that share no question, and pairs of answers to the questions of the last two:

- `sft.jsonl`      {"messages": [user, assistant]}: demonstrations that end in \\boxed{...}
- `train.jsonl`    {"messages": {user}, "gt_answer": "..."}: prompts for reinforcement learning
- `heldout.jsonl`  the same, for evaluation
- `pairs.jsonl`, `heldout_pairs.jsonl`  {"messages": {user}, "chosen": "...", "rejected": "..."}: a worked and right
  answer, and a wrong one, of which every other is worked too
- `judged.jsonl`, `heldout_judged.jsonl`  {"messages": {user}, "response": "...", "label": ...}: one of the two each

Questions are reasoning-gym's own, word for word. A worked answer to a chain of sums and differences writes one line for
each operation. The demonstrations are a hasty student's: right, but mostly without the work where the chain is short.
Imitation learns the haste too, without the student's gift; reinforcement finds out that working every problem pays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# What a model of half a million parameters learns within minutes; any other task runs with reasoning-gym's defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
        "min_terms": 3,
        "max_terms": 4,
        "min_digits": 1,
        "max_digits": 1,
    },
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
}

CHAIN = re.compile(r"\d+(?: [+-] \d+)+")

# From how many terms on a chain is long, and the shares of worked answers in `sft.jsonl`.
LONG_TERMS = 4
WORKED_IF_LONG = 0.9
WORKED_IF_SHORT = 0.2


def worked_answer(question: str, answer: str) -> str:
    """Return the boxed answer. For a chain of sums and differences, a line for each operation comes first."""
    steps = []
    if chain := CHAIN.search(question):
        first, *rest = chain.group().split(" ")
        total = int(first)
        for operator, term in zip(rest[::2], rest[1::2], strict=True):
            before, total = total, total + int(term) if operator == "+" else total - int(term)
            steps.append(f"{before}{operator}{term}={total}\n")
        if str(total) != answer:
            steps = []
    return "".join([*steps, box_answer(answer)])


def box_answer(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def demonstration(question: str, answer: str, generator: random.Random) -> str:
    """Return what the hasty student of `sft.jsonl` writes: for short chains, mostly the answer alone."""
    chain = CHAIN.search(question)
    long = chain is None or len(chain.group().split(" ")[::2]) >= LONG_TERMS
    worked = generator.random() < (WORKED_IF_LONG if long else WORKED_IF_SHORT)
    return worked_answer(question, answer) if worked else box_answer(answer)


def make_pair(question: str, answer: str, generator: random.Random) -> dict[str, str]:
    """Return a right and a wrong answer. A wrong number is off by 1 or 2."""
    number = re.fullmatch(r"-?\d+", answer)
    wrong = str(int(answer) + generator.choice((-2, -1, 1, 2))) if number else answer[::-1] + "?"
    right = worked_answer(question, answer)
    work = right.removesuffix(box_answer(answer)) if generator.random() < 0.5 else ""
    return {"chosen": right, "rejected": work + box_answer(wrong)}


def distinct_questions(task: str, settings: Mapping[str, Any], count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` different (question, answer) pairs, equal for equal arguments. Raises ValueError for too few."""
    import reasoning_gym

    draws = 20 * count
    seed *= 1_000_003  # reasoning-gym draws question i from seed + i: neighbouring seeds would share almost all
    answers: dict[str, str] = {}
    for entry in reasoning_gym.create_dataset(task, size=draws, seed=seed, **settings):
        answers.setdefault(entry["question"], str(entry["answer"]))
        if len(answers) == count:
            return list(answers.items())
    raise ValueError(
        f"{task} gave {len(answers)} different questions in {draws} draws, {count} are needed: widen --settings"
    )


def make_dataset(
    out: str | Path,
    *,
    task: str = "basic_arithmetic",
    settings: Mapping[str, Any] | None = None,
    sft: int = 3000,
    train: int = 2400,
    heldout: int = 200,
    seed: int = 0,
) -> Path:
    """Write the files into the folder `out` and return it; equal arguments give equal bytes.

    `settings` are fields of the task's reasoning-gym config, over those chosen here.
    """
    settings = SETTINGS.get(task, {}) | dict(settings or {})
    questions = iter(distinct_questions(task, settings, sft + train + heldout, seed))

    def take(count: int) -> Iterator[tuple[dict[str, str], str]]:
        for _ in range(count):
            question, answer = next(questions)
            yield {"role": "user", "content": question}, answer

    generator = random.Random(seed)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    held_out = list(take(heldout))
    write_lines(out / "heldout.jsonl", ({"messages": user, "gt_answer": answer} for user, answer in held_out))
    write_lines(
        out / "sft.jsonl",
        (
            {"messages": [user, {"role": "assistant", "content": demonstration(user["content"], answer, generator)}]}
            for user, answer in take(sft)
        ),
    )
    trained = list(take(train))
    write_lines(out / "train.jsonl", ({"messages": user, "gt_answer": answer} for user, answer in trained))
    for name, problems in (("pairs", trained), ("heldout_pairs", held_out)):
        pairs = [{"messages": user, **make_pair(user["content"], answer, generator)} for user, answer in problems]
        write_lines(out / f"{name}.jsonl", iter(pairs))
        judged = (
            {"messages": pair["messages"], "response": pair[("rejected", "chosen")[is_good]], "label": is_good}
            for pair, is_good in zip(pairs, itertools.cycle((True, False)), strict=False)
        )
        write_lines(out / f"{name.replace('pairs', 'judged')}.jsonl", judged)
    return out


def write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", default="basic_arithmetic", help="name of a reasoning-gym task")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON object of the task's config fields")
    parser.add_argument("--sft", type=int, default=3000, help="fine-tuning conversations")
    parser.add_argument("--train", type=int, default=2400, help="training problems")
    parser.add_argument("--heldout", type=int, default=200, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if find_spec("reasoning_gym") is None:
        parser.error(
            "the package reasoning-gym is missing; install it: launch/setup.sh reasoning-gym in a clone, else "
            "pip install 'megarl[reasoning-gym]'"
        )
    out = make_dataset(**vars(options))
    for path in sorted(out.glob("*.jsonl")):
        print(f"wrote {path}: {len(path.read_bytes().splitlines())} lines, first: {path.open().readline().strip()}")


if __name__ == "__main__":
    main()
