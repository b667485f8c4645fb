"""Draws from several sources by weight, and curricula by measured solve rate."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest

from megarl.config.sections.data_sets import CurriculumConfig
from megarl.data.curriculum import Curriculum
from megarl.data.mixture import Mixture, Position, Positions, SourceStream
from megarl.data.sampler import DataOrder
from megarl.types import Problem

PLAIN = CurriculumConfig()


def stream(name: str, weight: float, count: int, config: CurriculumConfig = PLAIN, seed: int = 0) -> SourceStream:
    """Problems whose level is the number of their ten."""
    problems = [Problem(n, (), (), "", {"level": n // 10}, source=name) for n in range(count)]
    return SourceStream(name, weight, problems, DataOrder(count, 1, seed), Curriculum.of(problems, config))


def draw(mixture: Mixture, count: int, positions: Positions) -> tuple[list[Problem], Positions]:
    found: list[Problem] = []
    for _ in range(count):
        problem, positions = mixture.draw(positions)
        found.append(problem)
    return found, positions


def test_shares_hold_at_any_time_and_streams_do_not_know_of_each_other() -> None:
    weights = {"a": 5.0, "b": 2.0, "c": 0.5}
    sizes = {"a": 7, "b": 50, "c": 3}
    found, _ = draw(Mixture([stream(n, w, sizes[n]) for n, w in weights.items()], seed=3), 300, {})
    for end in range(1, 301):
        counts = Counter(problem.source for problem in found[:end])
        assert all(abs(counts[name] - end * weight / 7.5) <= 1 for name, weight in weights.items())
    order = DataOrder(7, 1, 0)
    expected = [index for epoch in range(40) for index in order.epoch(epoch).tolist()]
    of_a = [problem.index for problem in found if problem.source == "a"]
    assert of_a == expected[: len(of_a)]
    alone, _ = draw(Mixture([stream("b", 1.0, 50)], seed=9), 60, {})
    assert [p.index for p in alone] == [p.index for p in found if p.source == "b"][:60]
    other, _ = draw(Mixture([stream(n, w, sizes[n]) for n, w in weights.items()], seed=4), 300, {})
    assert [p.source for p in other] != [p.source for p in found]


def test_draws_go_on_from_a_position_also_with_a_new_source_and_other_weights() -> None:
    def mixture(*more: SourceStream) -> Mixture:
        return Mixture([stream("a", 1.0, 20), stream("b", 3.0, 20), *more], seed=1)

    whole, _ = draw(mixture(), 50, {})
    _, half = draw(mixture(), 23, {})
    stored = {name: Position(**asdict(at)) for name, at in half.items()}
    assert draw(mixture(), 27, stored)[0] == whole[23:]
    grown, _ = draw(mixture(stream("c", 4.0, 20)), 80, stored)
    for name in "ab":
        before = [p.index for p in whole[:23] if p.source == name]
        assert before + [p.index for p in grown if p.source == name][:10] == [
            p.index for p in draw(Mixture([stream(name, 1.0, 20)], seed=0), len(before) + 10, {})[0]
        ]
    assert Counter(p.source for p in grown)["c"] == pytest.approx(40, abs=2)


@pytest.mark.parametrize("by", [None, "level"], ids=["by problem", "by level"])
def test_problems_outside_the_band_are_passed_over_and_tried_again(by: str | None) -> None:
    """The first thirty problems are never solved, the next thirty half of the time, the last always."""
    config = CurriculumConfig(band=(0.2, 0.8), outside=0.1, memory=0.5, by=by)
    mixture = Mixture([stream("a", 1.0, 90, config)], seed=1)
    positions: Positions = {}
    found: list[Problem] = []
    for _ in range(1500):
        problem, positions = mixture.draw(positions)
        positions = mixture.update_solve_rate(positions, problem, (0.0, 0.5, 1.0)[problem.index // 30])
        found.append(problem)
    counts = Counter(problem.index // 30 for problem in found[200:])
    assert counts[1] > 0.75 * 1300 and min(counts[0], counts[2]) > 50
    assert len({problem.index for problem in found}) > 80
    [metrics] = mixture.metrics(positions).values()
    assert metrics["known"] == 1.0 and metrics["below"] == metrics["above"] == pytest.approx(1 / 3)
    assert metrics["solve_rate"] == pytest.approx(0.5)
    assert metrics["skipped"] == positions["a"].taken - 1500


def test_sources_of_equal_size_skip_problems_independently() -> None:
    """All problems are too hard; of both sources about half is skipped, and not the same half."""
    config = CurriculumConfig(band=(0.2, 0.8), outside=0.5)
    mixture = Mixture([stream(name, 1.0, 50, config) for name in "ab"], seed=1)
    positions: Positions = {}
    drawn: dict[str, set[int]] = {"a": set(), "b": set()}
    for _ in range(300):
        problem, positions = mixture.draw(positions)
        positions = mixture.update_solve_rate(positions, problem, 0.0)
        drawn[problem.source].add(positions[problem.source].taken)
    seen = min(positions[name].taken for name in "ab")
    agree = sum((place in drawn["a"]) == (place in drawn["b"]) for place in range(50, seen))
    assert 0.35 < agree / (seen - 50) < 0.65


def test_epochs_are_counted_by_source() -> None:
    mixture = Mixture([stream("a", 3.0, 10), stream("b", 1.0, 4)], seed=3)
    assert mixture.epochs({}) == {}
    assert mixture.epochs(draw(mixture, 20, {})[1]) == {"a": 1.5, "b": 1.25}


def test_a_rate_forgets_slowly() -> None:
    config = CurriculumConfig(band=(0.2, 0.8), memory=0.75)
    curriculum = Curriculum.of([Problem(0, (), (), "")], config)
    rates = curriculum.update_rates(curriculum.update_rates({}, 0, 1.0), 0, 0.0)
    assert rates == {"0": 0.75}
    assert curriculum.update_rates(rates, 0, 0.25) == {"0": 0.625}
