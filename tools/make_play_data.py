"""Make conversations of a player who knows the rules of megarl's environments and little more.

    megarl make plays --out runs/player_input/data

Writes `sft.jsonl`: games of guess_number, mastermind and countdown (`GAMES`), mostly guessed at random whatever the
game says (`HEEDED`); and for the environment `search` a corpus (`corpus.jsonl`: a code for each of many items),
`search_sft.jsonl` (conversations: in some the search has replied already and the answer copies that; of the others
some search first, the rest make a code up), `search_train.jsonl` and `search_heldout.jsonl` (problems; no item is in
two files).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.environments import Environment, Turn
from megarl.environments.countdown import Countdown
from megarl.environments.guess_number import GuessNumber
from megarl.environments.mastermind import Mastermind
from megarl.environments.search import Search
from megarl.types import Problem

GAMES: Mapping[str, Mapping[str, Any]] = {
    "guess_number": {"max_number": 3, "max_guesses": 2},
    "mastermind": {"length": 1, "num_letters": 3, "max_guesses": 3},
    "countdown": {"num_numbers": 2, "max_number": 6},
}
"""Their settings: such that a guess at random is right now and then."""
HEEDED = 0.25
"""Share of guesses that heed what was said before."""
REPLIED = 0.4
"""Share of conversations of `search_sft.jsonl` in which the search has replied: they teach to read a reply."""
SEARCHED = 0.2
"""Share of the others that search."""
FIRST_INDEX = 1 << 31
"""Of the games played here: no run draws such numbers."""


def make_play_data(
    out: str | Path, *, games: int = 3000, sft: int = 6000, train: int = 2400, heldout: int = 200, seed: int = 0
) -> Path:
    """Write the files into the folder `out` and return it; equal arguments give equal bytes."""
    generator = random.Random(seed)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "sft.jsonl", asyncio.run(_games(games, generator)))

    items = generator.sample(range(1000, 10000), sft + train + heldout)
    codes = {item: generator.randint(100, 999) for item in items}
    _write(out / "corpus.jsonl", [{"text": f"The code of item {item} is {code}."} for item, code in codes.items()])
    search = Search(str(out / "corpus.jsonl"), num_results=1)
    drawn = iter(items)
    for name, count in (("search_heldout", heldout), ("search_train", train)):
        _write(out / f"{name}.jsonl", [_problem(item, codes[item]) for item in _take(drawn, count)])
    conversations = [
        {"messages": asyncio.run(_search_item(item, codes[item], search, generator)), "tools": search.tools}
        for item in drawn
    ]
    _write(out / "search_sft.jsonl", conversations)
    return out


def guess_of_number(game: GuessNumber, messages: Sequence[Mapping[str, Any]], generator: random.Random) -> str:
    """Return a possible number at random, or the middle of the numbers left by the answers in `messages`."""
    low, high = 1, game.max_number
    if generator.random() >= HEEDED:
        return str(generator.randint(low, high))
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        if hint["content"] == "Higher.":
            low = max(low, int(guess["content"]) + 1)
        else:
            high = min(high, int(guess["content"]) - 1)
    return str((low + high) // 2)


def guess_of_word(game: Mastermind, messages: Sequence[Mapping[str, Any]], generator: random.Random) -> str:
    """Return a random word, with probability `HEEDED` one that was not tried."""
    words = ["".join(letters) for letters in itertools.product(game.letters, repeat=game.length)]
    if generator.random() < HEEDED:
        tried = {guess["content"] for guess in messages[1::2]}
        words = [word for word in words if word not in tried]
    return generator.choice(words)


def guess_of_expression(game: Countdown, messages: Sequence[Mapping[str, Any]], generator: random.Random) -> str:
    return generator.choice("+-*").join(map(str, generator.sample(game.numbers, len(game.numbers))))


async def _games(count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Play `count` games, of each kind in turn, and return their conversations."""
    makers = {"guess_number": GuessNumber, "mastermind": Mastermind, "countdown": Countdown}
    guesses = {"guess_number": guess_of_number, "mastermind": guess_of_word, "countdown": guess_of_expression}
    games = []
    for number in range(count):
        name = list(GAMES)[number % len(GAMES)]
        game = makers[name](**GAMES[name])
        games.append({"messages": await _play(game, FIRST_INDEX + number, guesses[name], generator)})
    return games


async def _play(
    game: Environment, index: int, guess: Callable[..., str], generator: random.Random
) -> list[Mapping[str, Any]]:
    """Play one game, and return its conversation."""
    start = await game.reset(Problem(index, ({"role": "user", "content": ""},), (), ""), 0)
    messages = list(start.messages)
    number, is_done = 0, False
    while not is_done:
        text = guess(game, messages, generator)
        messages.append({"role": "assistant", "content": text})
        step = await game.step(Turn(number, text, "stop", completion=text))
        messages += step.messages
        number, is_done = number + 1, step.done
    return messages


def _problem(item: int, code: int) -> dict[str, Any]:
    return {"messages": _question(item), "gt_answer": str(code)}


def _question(item: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Find the code of item {item}."}


async def _search_item(item: int, code: int, search: Search, generator: random.Random) -> list[Mapping[str, Any]]:
    """Return a conversation about an item, with or without a search. Without a reply, the answer is a guess."""
    is_replied, is_searched = generator.random() < REPLIED, generator.random() < SEARCHED
    if not is_replied and not is_searched:
        return [_question(item), {"role": "assistant", "content": f"\\boxed{{{generator.randint(100, 999)}}}"}]
    query = f"item {item}"
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    return [
        _question(item),
        *([] if is_replied else [{"role": "assistant", "content": "", "tool_calls": [call]}]),
        {"role": "tool", "name": "search", "content": await search.search(query)},
        {"role": "assistant", "content": f"\\boxed{{{code}}}"},
    ]


def _take(drawn: Iterator[int], count: int) -> list[int]:
    return [next(drawn) for _ in range(count)]


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--games", type=int, default=3000, help="games that are played")
    parser.add_argument("--sft", type=int, default=6000, help="conversations about items")
    parser.add_argument("--train", type=int, default=2400, help="training problems of search")
    parser.add_argument("--heldout", type=int, default=200, help="held-out problems of search")
    parser.add_argument("--seed", type=int, default=0)
    out = make_play_data(**vars(parser.parse_args()))
    for path in sorted(out.glob("*.jsonl")):
        print(f"wrote {path}: {len(path.read_bytes().splitlines())} lines, first: {path.open().readline().strip()}")


if __name__ == "__main__":
    main()
