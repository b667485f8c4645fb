"""The samples of a run: read from its folder, chosen for a page, shortened, and made harmless to look at."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.report.recorded import RecordedRun, json_lines

STEPS_READ = 40
"""Steps of samples/ that a page is made from, the first and the last among them."""
FILE_BYTES = 8 << 20
"""Bytes read of one file of samples/."""

_NUM_EXTREME = 5
_NUM_CHANGED = 8
_NUM_TURNS = 4
_NUM_TOKEN_STEPS = 6
_NUM_RECORDS_WITH_TOKENS = 24
_TEXT = 4_000
_MESSAGE = 1_500
_TOKENS = 600

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


def read_records(path: Path, step: int, most_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file of samples/, each with its `step` and its `line`."""
    for line, record in enumerate(json_lines(path, most_bytes), 1):
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
    first: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    best: list[dict[str, Any]] = []
    worst: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    read = spread(files, STEPS_READ)
    shown_steps = {step for step, _ in spread(read, 4)}
    for step, path in read:
        records = list(read_records(path, step, FILE_BYTES))
        of_training = [record for record in records if "set" not in record]
        by_step.append((step, [_numbers(record) for record in of_training]))
        for record in records:
            if "set" in record:
                first.setdefault(_problem(record), record)
                last[_problem(record)] = record
        if step in shown_steps:
            high = extreme(of_training, _NUM_EXTREME, sign=-1)
            lines = {record["line"] for record in high}
            best += high
            worst += [record for record in extreme(of_training, _NUM_EXTREME, sign=1) if record["line"] not in lines]
            turns += _of_several_turns(records)[:_NUM_TURNS]
    return {
        "read": len(read),
        "there": len(files),
        "rewards": histograms(by_step, "reward"),
        "lengths": histograms(by_step, "tokens"),
        "best": [compact(record) for record in _newest_first(best)],
        "worst": [compact(record) for record in _newest_first(worst)],
        "changed": _changed(first, last),
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


def extreme(records: Iterable[Mapping[str, Any]], most: int, *, sign: int) -> list[dict[str, Any]]:
    """The records of the lowest rewards (`sign` 1) or the highest (-1); of equal ones, of different problems."""
    scored = [record for record in records if _is_number(record.get("reward"))]
    seen: Counter[tuple[str, float]] = Counter()
    ordered = []
    for record in scored:
        kind = (_problem(record), float(record["reward"]))
        ordered.append((sign * kind[1], seen[kind], record["line"], record))
        seen[kind] += 1
    return [dict(record) for *_, record in sorted(ordered, key=lambda item: item[:3])[:most]]


def compact(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a page shows it: shortened, visible; fields that it lacks are left out."""
    texts = {name: cut(str(record[name]), _MESSAGE) for name in ("set", "source", "reward_failure", "finish_reason")
             if record.get(name) is not None}  # fmt: skip
    numbers = {
        name: _short(record[name]) for name in ("step", "line", "reward", "tokens") if _is_number(record.get(name))
    }
    flags = {name: record[name] for name in ("answer_correct", "format_valid") if isinstance(record.get(name), bool)}
    found: dict[str, Any] = {**texts, **numbers, **flags, "prompt": _messages(record.get("prompt"))}
    if record.get("answer") not in (None, ""):
        found["answer"] = cut(_text(record["answer"]), _MESSAGE)
    if several := _turns(record):
        found["turns"] = several
    else:
        found["completion"] = cut(_text(record.get("completion", "")), _TEXT)
    return found


def _changed(first: Mapping[str, Mapping[str, Any]], last: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Held-out problems whose answers changed: those whose rewards changed most, gains and losses in turn."""
    pairs = [
        (_reward(last[key]) - _reward(before), before, last[key])
        for key, before in first.items()
        if last[key]["step"] != before["step"] and last[key].get("completion") != before.get("completion")
    ]
    gained = sorted((pair for pair in pairs if pair[0] > 0), key=lambda pair: -pair[0])
    lost = sorted((pair for pair in pairs if pair[0] < 0), key=lambda pair: pair[0])
    same = [pair for pair in pairs if pair[0] == 0]
    half = _NUM_CHANGED // 2
    chosen = [*gained[: _NUM_CHANGED - min(half, len(lost))], *lost[:half]]
    chosen += same[: _NUM_CHANGED - len(chosen)]
    counts = {"gained": len(gained), "lost": len(lost), "same": len(same), "problems": len(first)}
    return [{"before": compact(b), "after": compact(a), "change": _short(c), **counts} for c, b, a in chosen]


def _with_tokens(run: RecordedRun) -> list[dict[str, Any]]:
    """Samples token by token, newest first."""
    found = []
    for step, path in reversed(spread(run.token_files, _NUM_TOKEN_STEPS)):
        for record in read_records(path, step, FILE_BYTES):
            columns = record.get("columns")
            if isinstance(columns, dict) and len(found) < _NUM_RECORDS_WITH_TOKENS:
                found.append({**compact(record), "columns": _columns(columns), "cut": record.get("cut") or 0})
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
    turns = [turn for turn in _list(record.get("turns")) if isinstance(turn, Mapping)]
    return [
        {
            "completion": cut(_text(turn.get("completion", "")), _TEXT),
            **({"reward": _short(turn["reward"])} if _is_number(turn.get("reward")) else {}),
            "observation": _messages(turn.get("observation")),
        }
        for turn in turns
    ]


def _messages(value: Any) -> list[dict[str, str]]:
    """Messages as roles and texts; calls of tools and other fields are told as JSON."""
    found = []
    for message in _list(value) if not isinstance(value, Mapping | str) else [value]:
        if not isinstance(message, Mapping):
            found.append({"role": "", "text": cut(_text(message), _MESSAGE)})
            continue
        rest = {name: item for name, item in message.items() if name not in ("role", "content") and item}
        text = _text(message.get("content") or "") + (f"\n{_text(rest)}" if rest else "")
        found.append({"role": cut(str(message.get("role", "")), 40), "text": cut(text, _MESSAGE)})
    return found


def _of_several_turns(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Attempts with turns, those of the most different rewards first."""
    found = [dict(record) for record in records if len(_list(record.get("turns"))) > 1]
    found.sort(key=lambda record: -_reward(record))
    return found[:2] + found[-2:] if len(found) > 4 else found


def _problem(record: Mapping[str, Any]) -> str:
    """The text that tells a record's problem from others: set, source and index where recorded, else its prompt."""
    index = record.get("problem")
    return json.dumps([record.get("set"), record.get("source"), index, record.get("prompt") if index is None else None])


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("reward", "tokens")}


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"]) if _is_number(record.get("reward")) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
