"""Make the data of the tool recipe: products too large for a tiny student, some demonstrations with the calculator.

    megarl make tools --out runs/tiny_tools_input/data

Writes `sft.jsonl` (conversations: in some the calculator has replied already and the answer copies that; of the others
a small share calls it first, the rest answer at once), `train.jsonl` and `heldout.jsonl` (problems). No problem is in
two files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.environments.calculator import Calculator, as_text, evaluate

REPLIED = 0.4
"""Share of demonstrations in which the calculator has replied: they teach to read a reply, and nothing of calls."""
CALLED = 0.1
"""Share of the other demonstrations that call the calculator."""


def expressions(count: int, generator: random.Random) -> list[str]:
    """Return `count` different products of two three-digit numbers."""
    products: dict[str, None] = {}
    while len(products) < count:
        products[f"{generator.randint(100, 999)} * {generator.randint(100, 999)}"] = None
    return list(products)


def question(expression: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Calculate {expression}."}


def at_once(expression: str) -> list[dict[str, Any]]:
    """A conversation with an answer that repeats the product."""
    answer = f"The product is {expression} = {box_product(expression)}"
    return [question(expression), {"role": "assistant", "content": answer}]


def with_reply(expression: str, *, is_called: bool) -> list[dict[str, Any]]:
    """Return a conversation whose answer copies the calculator's reply, with or without the call before it."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return [
        question(expression),
        *([{"role": "assistant", "content": "", "tool_calls": [call]}] if is_called else []),
        {"role": "tool", "name": "calculator", "content": as_text(evaluate(expression))},
        {"role": "assistant", "content": box_product(expression)},
    ]


def box_product(expression: str) -> str:
    return f"\\boxed{{{as_text(evaluate(expression))}}}"


def demonstration(expression: str, called: float, generator: random.Random) -> list[dict[str, Any]]:
    """Return a conversation of one of three kinds. `called` is the share of calls among those without a reply."""
    if generator.random() < REPLIED:
        return with_reply(expression, is_called=False)
    is_called = generator.random() < called
    return with_reply(expression, is_called=True) if is_called else at_once(expression)


def make_tool_data(
    out: str | Path, *, sft: int = 6000, train: int = 2400, heldout: int = 200, called: float = CALLED, seed: int = 0
) -> Path:
    """Write the files into the folder `out` and return it; equal arguments give equal bytes."""
    generator = random.Random(seed)
    drawn = iter(expressions(sft + train + heldout, generator))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tools = Calculator().tools

    def problems(count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            expression = next(drawn)
            yield {"messages": question(expression), "gt_answer": as_text(evaluate(expression))}

    write_lines(out / "heldout.jsonl", problems(heldout))
    write_lines(out / "train.jsonl", problems(train))
    write_lines(
        out / "sft.jsonl",
        ({"messages": demonstration(next(drawn), called, generator), "tools": tools} for _ in range(sft)),
    )
    return out


def write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--sft", type=int, default=6000, help="fine-tuning conversations")
    parser.add_argument("--train", type=int, default=2400, help="training problems")
    parser.add_argument("--heldout", type=int, default=200, help="held-out problems")
    parser.add_argument("--called", type=float, default=CALLED, help="share of calls where there is no reply")
    parser.add_argument("--seed", type=int, default=0)
    out = make_tool_data(**vars(parser.parse_args()))
    for path in sorted(out.glob("*.jsonl")):
        print(f"wrote {path}: {len(path.read_bytes().splitlines())} lines, first: {path.open().readline().strip()}")


if __name__ == "__main__":
    main()
