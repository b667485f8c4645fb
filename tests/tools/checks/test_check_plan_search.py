"""The measured layouts of the check of `plan --search`: prediction, calibration and verdict, on made-up times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.families.published import PUBLISHED
from megarl.families.shape import shape_from_config
from megarl.planner.seconds.lengths import recorded_lengths
from megarl.planner.seconds.work import model_work
from tests.rank_pool import RankPool
from tools import check
from tools.checks import plan_search
from tools.layouts import cpu_speeds
from tools.layouts.cpu_speeds import CpuSpeeds
from tools.layouts.least_squares import minimise
from tools.layouts.measured_layouts import (
    CALIBRATING,
    LAYOUTS,
    PHASES,
    RANKS,
    Calibrated,
    Layout,
    Machine,
    phase_seconds,
    table,
)
from tools.runs import read_lines

SPEEDS = CpuSpeeds(flops=50e9, half_tokens=20.0, memory=10e9, link=1e9, latency=1e-4)
TRUE = Calibrated(gemm_efficiency=0.4, layer_seconds=2e-3, engine_step_seconds=8e-3, other_seconds=0.03)
PICK = Layout("dp2", 1, 2048)

Times = dict[Layout, dict[str, float]]


@pytest.fixture
def machine() -> Machine:
    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape = shape_from_config(dict(PUBLISHED["Qwen/Qwen3-0.6B"]) | small | heads)
    return Machine(
        shape, SPEEDS, recorded_lengths([20.0, 24.0, 24.0, 24.0], limit=24, prompt_tokens=19.0, source="made up")
    )


@pytest.fixture
def times(machine: Machine) -> Times:
    """Times of a machine that the cost model describes exactly, with constants that calibration does not know."""
    seconds = {layout: machine.predict(layout, TRUE) for layout in LAYOUTS}
    return {layout: {phase: getattr(of, phase) for phase in ("step", *PHASES)} for layout, of in seconds.items()}


def scaled(times: Times, layout: Layout, factor: float) -> Times:
    """Return the times with those of one layout multiplied."""
    return times | {layout: {phase: factor * value for phase, value in times[layout].items()}}


def test_at_least_twelve_layouts_use_two_ranks_and_every_axis() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) >= 12
    for layout in LAYOUTS:
        sizes = layout.sizes
        assert prod(sizes[axis] for axis in ("tp", "pp", "cp", "dp")) == RANKS
    for axis in ("tp", "pp", "cp", "vpp", "dp"):
        assert any(layout.sizes[axis] == 2 for layout in LAYOUTS), axis
    assert len(CALIBRATING) <= 3 and set(CALIBRATING) < set(LAYOUTS) and PICK not in CALIBRATING


def test_a_layout_sets_the_fields_of_the_recipe() -> None:
    assert Layout("pp2 vpp2", 2, 512).overrides == [
        "trainer.pp=2", "trainer.vpp=2", "rollout.tp=2", "trainer.max_tokens_per_microbatch=512",
    ]  # fmt: skip
    assert PICK.overrides == ["rollout.tp=1", "trainer.max_tokens_per_microbatch=2048"]


def test_speeds_of_the_rank_decide_the_prediction(machine: Machine) -> None:
    quiet = TRUE._replace(engine_step_seconds=1e-9, layer_seconds=1e-9)
    step = machine.predict(PICK, quiet)
    work = model_work(machine.shape)
    # 64 sequences of 42 tokens, half of them on each rank, forward and backward: three times the forward FLOPs. Scores,
    # the optimizer, small products and the slowest rank add to it.
    least = 3 * 32 * 42 * (work.layer_flops + work.head_flops) / (0.4 * 50e9)
    assert least < step.train < 1.2 * least
    # Four bytes a weight, read and written once at 10 GB/s, or once over a link of 1 GB/s.
    assert step.reshard == pytest.approx(4 * work.weights / 1e9)
    twice = Machine(machine.shape, SPEEDS._replace(flops=100e9), machine.lengths).predict(PICK, quiet)
    assert twice.train == pytest.approx(step.train / 2, rel=0.05) and twice.rollout < 0.7 * step.rollout
    slow_link = Machine(machine.shape, SPEEDS._replace(link=1e8, latency=1e-2), machine.lengths)
    split = Layout("tp2", 2, 2048)
    assert slow_link.predict(split, quiet).train > machine.predict(split, quiet).train
    # Two all-reduces in each of four layers, 9.9 ms slower in each of the about 23 steps after the first token.
    more = slow_link.predict(split, quiet).rollout - machine.predict(split, quiet).rollout
    assert more == pytest.approx(24 * 8 * 9.9e-3, rel=0.2)


def test_calibration_finds_constants_from_three_layouts_alone(machine: Machine, times: Times) -> None:
    found = machine.calibrate({layout: times[layout] for layout in CALIBRATING})
    for layout in LAYOUTS:
        assert machine.predict(layout, found).step == pytest.approx(times[layout]["step"], rel=0.05), layout
    assert found.other_seconds == pytest.approx(TRUE.other_seconds, rel=0.05)
    assert found.engine_step_seconds == pytest.approx(TRUE.engine_step_seconds, rel=0.2)
    others = {layout: scaled(times, layout, 3.0)[layout] for layout in LAYOUTS if layout not in CALIBRATING}
    assert machine.calibrate(times | others) == found


def test_the_table_compares_the_pick_with_the_best(machine: Machine, times: Times) -> None:
    *layouts, speeds, constants, error, verdict = table(machine, times)
    assert {row["layout"] for row in layouts} == {layout.name for layout in LAYOUTS}
    assert [row["step_predicted"] for row in layouts] == sorted(row["step_predicted"] for row in layouts)
    assert {row["layout"] for row in layouts if row["calibrating"] == "yes"} == {at.name for at in CALIBRATING}
    for row in layouts:
        assert sum(row[phase] for phase in PHASES) == pytest.approx(row["step"])
        assert sum(row[f"{phase}_predicted"] for phase in PHASES) == pytest.approx(row["step_predicted"])
    assert speeds["flops"] == 50e9 and constants["layer_seconds"] > 0 and error["median_error"] < 0.05
    assert verdict["pick"] == verdict["best"] == PICK.name and verdict["ratio"] == 1.0 and verdict["met"]
    assert all("met" not in row for row in layouts)


@pytest.mark.parametrize(("factor", "status"), [(0.96, 0), (0.90, 1)], ids=["within 5 %", "beyond"])
def test_a_faster_layout_than_the_pick_decides_the_exit_code(
    machine: Machine, times: Times, factor: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    better = Layout("cp2", 1, 512)
    changed = scaled(times, better, factor * times[PICK]["step"] / times[better]["step"])

    def measured(rounds: int) -> Iterator[dict[str, Any]]:
        assert rounds == 2
        yield from table(machine, changed)

    monkeypatch.setattr(plan_search, "measure_layouts", measured)
    rows_file = tmp_path / "rows.jsonl"
    assert check.main(["plan_search", "--measure", "--rounds", "2", "--json", str(rows_file)]) == status
    verdict = read_lines(rows_file)[-1]
    assert (verdict["pick"], verdict["best"]) == (PICK.name, better.name)
    assert verdict["ratio"] == pytest.approx(1 / factor) and verdict["met"] is (status == 0)


def test_seconds_are_medians_without_the_first_steps() -> None:
    def row(step: int, rollout: float) -> dict[str, float]:
        own = {"time/rollout_seconds": rollout, "time/train_seconds": 2.0, "time/reshard_seconds": 0.5}
        return {"step": step, "time/step_seconds": rollout + 3.0, **own}

    first = [{"step": 0, "time/step_seconds": 90.0}, row(1, 70.0), row(2, 60.0), row(3, 1.0), row(4, 2.0)]
    second = [row(1, 70.0), row(2, 60.0), row(3, 7.0)]
    assert phase_seconds([first, second]) == {"step": 5.0, "rollout": 2.0, "train": 2.0, "reshard": 0.5, "other": 0.5}


def test_least_squares_finds_the_minimum_of_a_curved_valley() -> None:
    # Rosenbrock's function, whose minimum is at (1, 1).
    found = minimise(lambda at: np.array([10 * (at[1] - at[0] ** 2), 1 - at[0]]), np.array([-0.5, 0.5]))
    assert found == pytest.approx([1.0, 1.0], abs=1e-2)


def test_ranks_are_probed(ranks: RankPool) -> None:
    found = ranks.run(cpu_speeds.probe, 64, 128, 1 << 16, world_size=2)
    assert len(found) == 2
    for flops, half_tokens, memory, link, latency in found:
        assert flops > 1e8 and 0 <= half_tokens < math.inf and memory > 1e8 and link > 1e5 and 0 < latency < 1
