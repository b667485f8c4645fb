"""The samples of a run: read from its folder, chosen for a page, shortened, and made harmless to look at."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.report.recorded import RecordedRun, json_lines

STEPS_READ = 40
"""Steps of samples/ that a page is made from, the first and the last among them."""
BYTES_READ = 2 << 30
"""Bytes of samples/ that a page is made from: of larger files fewer steps, but each of them whole."""

_NUM_EXTREME = 5
_NUM_CHANGED = 8
_NUM_TURNS = 4
_NUM_TOKEN_STEPS = 6
_NUM_RECORDS_WITH_TOKENS = 24
_TEXT = 4_000
_MESSAGE = 1_500
_TOKENS = 600
_TURNS_OF_END = 20
"""Turns of an attempt that are shown from its beginning, and as many from its end; so of a prompt's messages."""
_MESSAGES_OF_END = 3
"""As `_TURNS_OF_END`, of the messages that answer a turn."""
_TEXT_OF_TURNS = 60_000
"""Characters of an attempt's turns together: of many turns each is shortened to less. So of a prompt's messages."""
_TEXT_OF_PROMPT = 30_000
_LEAST_TEXT = 200

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters that are not seen but change what is: control characters but tab and line feed, bidirectional controls,
those of no width, lone surrogates."""


def visible(text: str) -> str:
    """The text with hidden characters as visible ones: control characters as their pictures, others as `<U+202E>`."""
    return _HIDDEN.sub(_picture, text.replace("\r\n", "\n"))


def cut(text: str, most: int) -> str:
    """A visible text of at most about so many characters: of a longer one beginning and end, and what was left out."""
    if len(text) <= most:
        return visible(text)
    head = most * 2 // 3
    tail = most - head
    return f"{visible(text[:head])}\n[... {len(text) - most} characters left out ...]\n{visible(text[-tail:])}"


def read_records(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The records of a file of samples/, each with its `step` and its `line`."""
    for line, record in enumerate(json_lines(path), 1):
        yield {**record, "step": step, "line": line}


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def summary(run: RecordedRun) -> dict[str, Any]:
    """The part of a run's samples that a page shows.

    `rewards` and `lengths`: those of each step's samples of training, as histograms by step; `best` and `worst`, newest
    first; `changed`: held-out problems whose answers changed most from the first to the last evaluation; `turns`:
    attempts of several turns; `tokens`: samples token by token; `read` and `there`: steps with samples, read and
    recorded.
    """
    files = run.sample_files
    by_step: list[tuple[int, list[dict[str, Any]]]] = []
    held_out: dict[str, _HeldOut] = {}
    best: list[dict[str, Any]] = []
    worst: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    read = _steps_to_read(files)
    shown_steps = {step for step, _ in spread(read, 4)}
    for step, path in read:
        numbers = []
        high, low, of_turns = _Extreme(_NUM_EXTREME, sign=-1), _Extreme(_NUM_EXTREME, sign=1), _OfSeveralTurns()
        for record in read_records(path, step):
            if "set" in record:
                held_out.setdefault(_problem(record), _HeldOut()).add(record)
            else:
                numbers.append(_numbers(record))
            if step in shown_steps:
                of_turns.add(record)
                if "set" not in record:
                    high.add(record)
                    low.add(record)
        by_step.append((step, numbers))
        lines = {record["line"] for record in high.records}
        best += high.records
        worst += [record for record in low.records if record["line"] not in lines]
        turns += of_turns.records
    return {
        "read": len(read),
        "there": len(files),
        "rewards": histograms(by_step, "reward"),
        "lengths": histograms(by_step, "tokens"),
        "best": [compact(record) for record in _newest_first(best)],
        "worst": [compact(record) for record in _newest_first(worst)],
        "changed": _changed(held_out, dict(files)),
        "turns": [compact(record) for record in reversed(turns)],
        "tokens": _with_tokens(run),
    }


def histograms(by_step: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], name: str, bins: int = 24) -> dict[str, Any]:
    """How often a number of records lies where, by step: `edges` [bins + 1], `steps`, `counts` [steps][bins].

    Of few different values each has a bin of its own: then `values` takes the place of `edges`. Empty without numbers.
    """
    found = [(step, [float(r[name]) for r in records if _is_number(r.get(name))]) for step, records in by_step]
    found = [(step, numbers) for step, numbers in found if numbers]
    distinct = sorted({number for _, numbers in found for number in numbers})
    if not distinct:
        return {}
    steps = [step for step, _ in found]
    if len(distinct) <= 8:
        counts = [[numbers.count(value) for value in distinct] for _, numbers in found]
        return {"values": distinct, "steps": steps, "counts": counts}
    low, high = distinct[0], distinct[-1]
    width = (high - low) / bins
    counts = []
    for _, numbers in found:
        row = [0] * bins
        for number in numbers:
            row[min(bins - 1, int((number - low) / width))] += 1
        counts.append(row)
    return {"edges": [low + width * number for number in range(bins + 1)], "steps": steps, "counts": counts}


def _newest_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records by step, the newest step first; those of a step in their order."""
    return sorted(records, key=lambda record: -record["step"])


class _Least:
    """The records of the least keys among all that are added, in order; no two keys are equal."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[tuple[tuple[float, ...], dict[str, Any]]] = []

    def add(self, key: tuple[float, ...], record: Mapping[str, Any]) -> None:
        if len(self._kept) < self._most or (self._kept and key < self._kept[-1][0]):
            insort(self._kept, (key, dict(record)), key=lambda item: item[0])
            del self._kept[self._most :]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for _, record in self._kept]


class _Extreme:
    """The records of the lowest rewards (`sign` 1) or the highest (-1); of equal ones, of different problems."""

    def __init__(self, most: int, *, sign: int) -> None:
        self._least = _Least(most)
        self._sign = sign
        self._seen: Counter[tuple[str, float]] = Counter()
        self._number = 0

    def add(self, record: Mapping[str, Any]) -> None:
        if not _is_number(record.get("reward")):
            return
        kind = (_problem(record), float(record["reward"]))
        self._number += 1
        self._least.add((self._sign * kind[1], self._seen[kind], record["line"], self._number), record)
        self._seen[kind] += 1

    @property
    def records(self) -> list[dict[str, Any]]:
        return self._least.records


class _OfSeveralTurns:
    """Attempts with turns among all that are added: at most four, those of the most different rewards."""

    def __init__(self) -> None:
        self._high, self._low = _Least(_NUM_TURNS // 2), _Least(_NUM_TURNS // 2)

    def add(self, record: Mapping[str, Any]) -> None:
        if len(_list(record.get("turns"))) < 2:
            return
        self._high.add((-_reward(record), record["line"]), record)
        self._low.add((_reward(record), -record["line"]), record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Those of the highest rewards first."""
        found = {record["line"]: record for record in [*self._high.records, *reversed(self._low.records)]}
        return list(found.values())


def extreme(records: Iterable[Mapping[str, Any]], most: int, *, sign: int) -> list[dict[str, Any]]:
    """The records of the lowest rewards (`sign` 1) or the highest (-1); of equal ones, of different problems."""
    found = _Extreme(most, sign=sign)
    for record in records:
        found.add(record)
    return found.records


def compact(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a page shows it: shortened, visible; fields that it lacks are left out."""
    texts = {name: cut(str(record[name]), _MESSAGE) for name in ("set", "source", "reward_failure", "finish_reason")
             if record.get(name) is not None}  # fmt: skip
    prompt_text = _TEXT_OF_PROMPT // max(1, min(len(_list(record.get("prompt"))), 2 * _TURNS_OF_END))
    prompt = _messages(record.get("prompt"), ends=_TURNS_OF_END, most=min(_MESSAGE, prompt_text))
    numbers = {
        name: _short(record[name]) for name in ("step", "line", "reward", "tokens") if _is_number(record.get(name))
    }
    flags = {name: record[name] for name in ("answer_correct", "format_valid") if isinstance(record.get(name), bool)}
    found: dict[str, Any] = {**texts, **numbers, **flags, "prompt": prompt}
    if record.get("answer") not in (None, ""):
        found["answer"] = cut(_text(record["answer"]), _MESSAGE)
    if several := _turns(record):
        found["turns"] = several
    else:
        found["completion"] = cut(_text(record.get("completion", "")), _TEXT)
    return found


@dataclass(slots=True)
class _Evaluated:
    """The samples of a held-out problem in one evaluation: of each its line, reward and a hash of what was said."""

    step: int
    samples: list[tuple[int, float, bytes]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(reward for _, reward, _ in self.samples) / len(self.samples)

    @property
    def said(self) -> list[bytes]:
        return sorted(said for *_, said in self.samples)

    @property
    def shown(self) -> tuple[int, int]:
        """Step and line of the sample whose reward is nearest to the mean."""
        mean = self.mean
        return self.step, min(self.samples, key=lambda sample: (abs(sample[1] - mean), sample[0]))[0]


@dataclass(slots=True)
class _HeldOut:
    """A held-out problem in its first and its last evaluation."""

    first: _Evaluated | None = None
    last: _Evaluated | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a sample; evaluations come in order."""
        step = record["step"]
        if self.first is None:
            self.first = self.last = _Evaluated(step)
        elif self.last is not None and self.last.step != step:
            self.last = _Evaluated(step)
        if self.last is not None:
            self.last.samples.append((record["line"], _reward(record), digest(_said(record))))


def changed_between(before: Path, after: Path, most: int) -> list[dict[str, Any]]:
    """Problems whose answers differ in two evaluations' files, as `summary` has them; by right answers, not rewards."""
    problems: dict[str, _HeldOut] = {}
    files = {0: before, 1: after}
    for number, path in files.items():
        for record in read_records(path, number):
            scored = {**record, "reward": float(record.get("answer_correct") is True)}
            problems.setdefault(_problem(record), _HeldOut()).add(scored)
    found = _changed(problems, files, most)
    for pair in found:
        for side in ("before", "after"):
            pair[side].pop("step", None)
    return found


def _changed(
    problems: Mapping[str, _HeldOut], files: Mapping[int, Path], most: int = _NUM_CHANGED
) -> list[dict[str, Any]]:
    """Held-out problems whose answers changed: those whose mean rewards changed most, gains and losses in turn."""
    pairs = [
        (one.last.mean - one.first.mean, one.first, one.last)
        for one in problems.values()
        if one.first and one.last and one.last.step != one.first.step and one.last.said != one.first.said
    ]
    gained = sorted((pair for pair in pairs if pair[0] > 0), key=lambda pair: -pair[0])
    lost = sorted((pair for pair in pairs if pair[0] < 0), key=lambda pair: pair[0])
    same = [pair for pair in pairs if pair[0] == 0]
    half = most // 2
    chosen = [*gained[: most - min(half, len(lost))], *lost[:half]]
    chosen += same[: most - len(chosen)]
    counts = {"gained": len(gained), "lost": len(lost), "same": len(same), "problems": len(problems)}
    records = _fetched({place for _, *pair in chosen for place in (pair[0].shown, pair[1].shown)}, files)
    return [
        {
            "before": _of_several(records[before.shown], before),
            "after": _of_several(records[after.shown], after),
            "change": _short(change),
            **counts,
        }
        for change, before, after in chosen
        if before.shown in records and after.shown in records
    ]


def _of_several(record: Mapping[str, Any], evaluated: _Evaluated) -> dict[str, Any]:
    """A record as a page shows it; where it is one of several samples of its problem, with their mean reward."""
    count = len(evaluated.samples)
    several = {"samples": count, "mean": _short(evaluated.mean)} if count > 1 else {}
    return {**compact(record), **several}


def _fetched(places: Iterable[tuple[int, int]], files: Mapping[int, Path]) -> dict[tuple[int, int], dict[str, Any]]:
    """The records of these steps and lines, read again."""
    lines: dict[int, set[int]] = {}
    for step, line in places:
        lines.setdefault(step, set()).add(line)
    return {
        (step, record["line"]): record
        for step, wanted in lines.items()
        for record in read_records(files[step], step)
        if record["line"] in wanted
    }


def _steps_to_read(files: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Steps that a page is made from, evenly spread: fewer where their files are large, but the first and the last."""
    sizes = {path: path.stat().st_size for _, path in files}
    most = min(STEPS_READ, len(files))
    while most > 2 and sum(sizes[path] for _, path in spread(files, most)) > BYTES_READ:
        most -= 1
    return spread(files, most)


def _with_tokens(run: RecordedRun) -> list[dict[str, Any]]:
    """Samples token by token, newest first."""
    found: list[dict[str, Any]] = []
    for step, path in reversed(spread(run.token_files, _NUM_TOKEN_STEPS)):
        for record in read_records(path, step):
            if len(found) == _NUM_RECORDS_WITH_TOKENS:
                return found
            columns = record.get("columns")
            if isinstance(columns, dict):
                found.append({**compact(record), "columns": _columns(columns), "cut": _count(record.get("cut"))})
                found[-1].pop("completion", None)
    return found


def _columns(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The arrays of a sample's tokens: texts visible, numbers short, all of one length."""
    texts = [visible(str(text)) for text in _list(columns.get("text"))][:_TOKENS]
    found: dict[str, list[Any]] = {"text": texts}
    for name, values in columns.items():
        numbers = _list(values)[: len(texts)]
        if name != "text" and len(numbers) == len(texts):
            found[str(name)] = [_short(value) if _is_number(value) else None for value in numbers]
    return found


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns with their numbers: of many the first and the last ones, so that numbers are left out between them."""
    numbered = [
        (number, turn) for number, turn in enumerate(_list(record.get("turns")), 1) if isinstance(turn, Mapping)
    ]
    if len(numbered) > 2 * _TURNS_OF_END:
        numbered = [*numbered[:_TURNS_OF_END], *numbered[-_TURNS_OF_END:]]
    texts = sum(1 + min(len(_list(turn.get("observation"))), 2 * _MESSAGES_OF_END) for _, turn in numbered)
    most = max(_LEAST_TEXT, _TEXT_OF_TURNS // max(1, texts))
    return [
        {
            "number": number,
            "completion": cut(_text(turn.get("completion", "")), min(_TEXT, most)),
            **({"reward": _short(turn["reward"])} if _is_number(turn.get("reward")) else {}),
            "observation": _messages(turn.get("observation"), ends=_MESSAGES_OF_END, most=min(_MESSAGE, most)),
        }
        for number, turn in numbered
    ]


def _messages(value: Any, *, ends: int, most: int) -> list[dict[str, str]]:
    """Messages as roles and texts; calls of tools and other fields are told as JSON.

    Of more than twice `ends` those between the first and the last ones are left out, which a message in their place
    tells.
    """
    messages = _list(value) if not isinstance(value, Mapping | str) else [value]
    left_out = len(messages) - 2 * ends
    if left_out <= 0:
        return [_message(message, most) for message in messages]
    told = {"role": "", "text": f"[... {left_out} messages left out ...]"}
    head, tail = messages[:ends], messages[-ends:]
    return [*(_message(message, most) for message in head), told, *(_message(message, most) for message in tail)]


def _message(message: Any, most: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        return {"role": "", "text": cut(_text(message), most)}
    rest = {name: item for name, item in message.items() if name not in ("role", "content") and item}
    text = _text(message.get("content") or "") + (f"\n{_text(rest)}" if rest else "")
    return {"role": cut(str(message.get("role", "")), 40), "text": cut(text, most)}


def _problem(record: Mapping[str, Any]) -> str:
    """A hash that tells a record's problem from others: of set, source and index where recorded, else its prompt."""
    index = record.get("problem")
    prompt = record.get("prompt") if index is None else None
    return digest([record.get("set"), record.get("source"), index, prompt]).hex()


def _said(record: Mapping[str, Any]) -> Any:
    """The completion of each turn, or the only one."""
    turns = [turn.get("completion") for turn in _list(record.get("turns")) if isinstance(turn, Mapping)]
    return turns or record.get("completion")


def digest(value: Any) -> bytes:
    """A hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("reward", "tokens")}


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"]) if _is_number(record.get("reward")) else 0.0


def _is_number(value: Any) -> bool:
    """Whether it is a number that is finite, also when it is rounded or a little is added; not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _count(value: Any) -> int:
    return int(value) if _is_number(value) else 0


def _short(value: Any) -> Any:
    number = float(f"{float(value):.4g}") if not isinstance(value, int) else value
    return int(number) if float(number).is_integer() else number


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
