"""Make JSONL data sets from a procedural task of reasoning-gym: fine-tuning, training and held-out.

    python tools/make_dataset.py --out runs/arithmetic --task basic_arithmetic --sft 1500 --train 3000 --heldout 200

Writes three files that share no question:

- `sft.jsonl`      {"messages": [user, assistant]}: worked answers that end in \\boxed{...}
- `train.jsonl`    {"messages": {user}, "gt_answer": "..."}: prompts for reinforcement learning
- `heldout.jsonl`  the same, for evaluation

Questions are reasoning-gym's own, word for word. Where a question is a chain of sums and differences, the worked answer
states the running total after each operation, one a line; elsewhere it is the boxed answer alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What a model of half a million parameters learns within minutes; any other task runs with reasoning-gym's defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
        "min_terms": 3,
        "max_terms": 3,
        "min_digits": 1,
        "max_digits": 1,
    },
    "chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}

CHAIN = re.compile(r"\d+(?: [+-] \d+)+")


def worked_answer(question: str, answer: str) -> str:
    """The boxed answer, after the running totals where the question is a chain of sums and differences."""
    steps = []
    if chain := CHAIN.search(question):
        total, *rest = chain.group().split(" ")
        total = int(total)
        for operator, term in zip(rest[::2], rest[1::2], strict=True):
            total += int(term) if operator == "+" else -int(term)
            steps.append(str(total))
        if steps[-1] != answer:
            steps = []
    return "\n".join([*steps[:-1], f"\\boxed{{{answer}}}"])


def distinct_questions(task: str, settings: Mapping[str, Any], count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different (question, answer) pairs, equal for equal arguments; ValueError if the task has too few."""
    import reasoning_gym

    draws = 20 * count
    found: dict[str, str] = {}
    for entry in reasoning_gym.create_dataset(task, size=draws, seed=seed, **settings):
        found.setdefault(entry["question"], str(entry["answer"]))
        if len(found) == count:
            return list(found.items())
    raise ValueError(
        f"{task} gave {len(found)} different questions in {draws} draws, {count} are needed: widen --settings"
    )


def make_dataset(
    out: str | Path,
    *,
    task: str = "basic_arithmetic",
    settings: Mapping[str, Any] | None = None,
    sft: int = 1500,
    train: int = 3000,
    heldout: int = 200,
    seed: int = 0,
) -> Path:
    """Write the three files into the folder `out` and return it; equal arguments give equal bytes.

    `settings` are fields of the task's reasoning-gym config, over those chosen here.
    """
    settings = SETTINGS.get(task, {}) | dict(settings or {})
    pairs = iter(distinct_questions(task, settings, sft + train + heldout, seed))

    def take(count: int) -> Iterator[tuple[dict[str, str], str]]:
        for _ in range(count):
            question, answer = next(pairs)
            yield {"role": "user", "content": question}, answer

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "heldout.jsonl", ({"messages": user, "gt_answer": answer} for user, answer in take(heldout)))
    write_lines(
        out / "sft.jsonl",
        (
            {"messages": [user, {"role": "assistant", "content": worked_answer(user["content"], answer)}]}
            for user, answer in take(sft)
        ),
    )
    write_lines(out / "train.jsonl", ({"messages": user, "gt_answer": answer} for user, answer in take(train)))
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
    parser.add_argument("--sft", type=int, default=1500, help="fine-tuning conversations")
    parser.add_argument("--train", type=int, default=3000, help="training problems")
    parser.add_argument("--heldout", type=int, default=200, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    out = make_dataset(**vars(parser.parse_args()))
    for path in sorted(out.glob("*.jsonl")):
        print(f"wrote {path}: {len(path.read_bytes().splitlines())} lines, first: {path.open().readline().strip()}")


if __name__ == "__main__":
    main()
