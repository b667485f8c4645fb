"""Records on disk give what records in memory give: problems, draws, curricula, places, faults."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.sections.data_sets import CurriculumConfig
from megarl.data.chat import load_tokenizer
from megarl.data.curriculum import Curriculum
from megarl.data.kinds.problems import Problems
from megarl.data.mixture import Mixture, Positions, SourceStream
from megarl.data.reader import collect_count, in_memory, read_examples
from megarl.data.records import TooLongError
from megarl.data.sampler import DataOrder
from megarl.data.streamed import Places, Streamed, numbers_of
from megarl.types import DataError, Problem

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@pytest.fixture
def read(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """`read(streamed=True)`: the problems of two files, some of whose prompts are too long."""
    for number, primes in enumerate((PRIMES[:5], PRIMES[5:])):
        lines = [
            json.dumps({"messages": {"role": "user", "content": f"{n} é" + " + 1" * (60 * (n % 3 == 2))}, "answer": n})
            for n in primes
        ]
        (tmp_path / f"data-{number:05d}-of-00002.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(tiny_model())
    long: list[TooLongError] = []

    def made(*, streamed: bool, **settings: Any) -> Any:
        def on_disk(*arguments: Any) -> Streamed[Problem]:
            return Streamed(*arguments, folder=tmp_path)

        on_long = settings.pop("on_long", long.append)
        settings = {"max_tokens": 100, "system_prompt": None} | settings
        kind = Problems(tokenizer=tokenizer, source_name="primes", **settings)
        return read_examples(tmp_path, kind, collect=on_disk if streamed else in_memory, on_long=on_long)

    made.long = long  # type: ignore[attr-defined]
    return made


def test_problems_are_the_same_in_any_order(read: Callable[..., Any], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    memory, disk = read(streamed=False), read(streamed=True)
    assert isinstance(disk, Streamed) and len(disk) == len(memory) == 4
    assert [problem.answer for problem in memory] == ["3", "7", "13", "19"]
    for place in (2, 0, 3, 1, -1):
        assert disk[place] == memory[place]
    assert disk[1:3] == memory[1:3] and list(disk) == memory
    assert numbers_of(disk).tolist() == numbers_of(memory).tolist() == [1, 3, 5, 7]
    assert (
        [str(error).partition(":")[0] for error in read.long[:4]]
        == [  # type: ignore[attr-defined]
            str(error).partition(":")[0]
            for error in read.long[4:]  # type: ignore[attr-defined]
        ]
    )
    assert set(tmp_path.iterdir()) == before  # its file has no name


def test_an_empty_source_and_faults(read: Callable[..., Any]) -> None:
    assert len(read(streamed=True, max_tokens=1)) == 0
    with pytest.raises(TooLongError, match="line 1: the prompt has"):
        read(streamed=True, max_tokens=1, on_long=None)
    with pytest.raises(DataError, match=r"line 1: has no field 'level', named by data\.curriculum\.by"):
        read(streamed=True, required_fields={"level": "data.curriculum.by"})


def test_the_collector_closes_the_file_of_faulty_records(read: Callable[..., Any]) -> None:
    """The error refers to the object with the file, and here the error also refers to itself."""
    gc.collect()
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(TooLongError) as refusal:
            read(streamed=True, max_tokens=1, on_long=None)
        refusal.value.cycle = refusal  # type: ignore[attr-defined]
        del refusal
        gc.collect()
    assert [str(warning.message) for warning in unclosed if warning.category is ResourceWarning] == []


def test_results_may_only_be_counted() -> None:
    assert len(collect_count([1, 2, 3], lambda index, record: record, None)) == 3  # type: ignore[list-item]


def test_places_of_problems() -> None:
    places = Places([Problem(index, (), (), "") for index in (5, 2, 11)])
    assert [places.get(index) for index in (2, 5, 11, 3, 0, 12)] == [1, 0, 2, None, None, None]
    assert Places([]).get(0) is None


def test_buckets_are_read_without_problems_being_made(
    read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CurriculumConfig(band=(0.2, 0.8), by="answer")
    memory, disk = read(streamed=False), read(streamed=True)
    monkeypatch.setattr(disk, "_make", None)
    assert Curriculum.of(disk, config).buckets == Curriculum.of(memory, config).buckets == ["3", "7", "13", "19"]


def test_draws_and_curricula_are_the_same(read: Callable[..., Any]) -> None:
    """Also after a resume in the middle, whose state is the positions alone."""
    config = CurriculumConfig(band=(0.2, 0.8), outside=0.3)

    def mixture(streamed: bool) -> Mixture:
        problems = read(streamed=streamed)
        order = DataOrder(len(problems), 1, seed=3)
        return Mixture([SourceStream("primes", 1.0, problems, order, Curriculum.of(problems, config))], seed=3)

    drawn: dict[bool, list[str]] = {}
    for streamed in (False, True):
        one, positions, drawn[streamed] = mixture(streamed), dict[str, Any](), []
        for number in range(40):
            if number == 20 and streamed:
                one = mixture(streamed)
            problem, moved = one.draw(positions)
            positions: Positions = one.update_solve_rate(moved, problem, solve_rate=int(problem.answer) % 4 / 4)
            drawn[streamed].append(problem.answer)
    assert drawn[True] == drawn[False] and len(set(drawn[True])) == 4
