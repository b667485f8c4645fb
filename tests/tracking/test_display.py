"""The progress of a run on a terminal and through a pipe."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from megarl.tracking.display import MOST_LINES, Closing, Display
from megarl.tracking.step_table import StepTable, left_text, short_number
from megarl.types import ConfigError
from tests.stand_ins.terminal_screen import run_in_terminal, shown

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, threading
from megarl.tracking.display import Display

display = Display()
seen = threading.Event()
status = display.status

def watched():
    found = status()
    if "half 0 s" in found.plain and "step 2/3" in found.plain:
        seen.set()
    return found

display.status = watched
with display.live():
    display.begin_steps(3)
    with display.phase("starting 2 ranks", is_printed=True):
        pass
    display.step(1, {"reward/mean": 0.25, "time/step_seconds": 1.0})
    display.warn("look out")
    if display.is_live:
        print("from elsewhere", file=sys.stderr)
    display.begin_step(2)
    with display.phase("half"):
        assert not display.is_live or seen.wait(60)
    display.step(2, {"reward/mean": 0.75, "time/step_seconds": 1.0})
print("and then")
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def displayed(**settings: str) -> tuple[Display, Clock, io.StringIO]:
    text, clock = io.StringIO(), Clock()
    return Display(Console(file=text, width=400, highlight=False), clock=clock), clock, text


def test_on_a_terminal_a_line_is_rewritten_below_those_that_stay() -> None:
    code, written = run_in_terminal([sys.executable, "-c", RUN], ROOT)
    assert code == 0, written
    # While the phase went on there was a line with the step, the phase and the course of the reward.
    assert re.search(r"step 2/3  half 0 s  .*0\.25", written)
    lines = [line.rstrip() for line in shown(written)]
    assert [re.sub(r"    1\.0( 0:00:0\d)?$", "", line) for line in lines if line] == [
        "          reward s/step    left",
        "step 1/3   0.250",
        "warning: look out",
        "from elsewhere",
        "step 2/3   0.750",
        "and then",
    ]
    # A process that is killed leaves the cursor as it was.
    assert "\x1b[?25l" not in written


@pytest.mark.parametrize("terminal", ["pipe", "pipe that colours are forced on", "dumb"])
def test_elsewhere_there_are_plain_lines_alone(terminal: str) -> None:
    command = [sys.executable, "-c", RUN]
    if terminal == "dumb":
        code, written = run_in_terminal(["env", "TERM=dumb", *command], ROOT)
        written = written.replace("\r\n", "\n")
    else:
        environment = os.environ | ({"FORCE_COLOR": "1"} if "forced" in terminal else {})
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
        code, written = done.returncode, done.stdout
    assert code == 0 and "\r" not in written and "\x1b[2K" not in written
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "starting 2 ranks",
        "",
        "step 1/3",
        "warning: look out",
        "step 2/3",
        "and then",
    ]


ROW = {
    "reward/mean": 0.5, "reward/accuracy": 0.25, "rollout/completion_tokens/mean": 31.5, "rollout/truncated": 0.125,
    "kl/reference": 0.002, "kl/update": 7.0, "train/entropy": 1.5, "perf/tokens_per_second_per_rank": 1234.5,
    "val/easy/accuracy": 0.75, "val/easy/data_source/a/accuracy": 0.5, "time/step_seconds": 2.0, "train/loss": 9.0,
}  # fmt: skip


def test_a_step_s_line_shows_what_gives_a_hacked_reward_away() -> None:
    display, clock, text = displayed()
    display.begin_steps(12)
    display.step(1, ROW)
    clock.now += 6
    display.step(3, ROW)
    display.step(4, {"train/loss": 0.5, "kl/update": 0.25, "time/step_seconds": 1.0})
    assert text.getvalue().splitlines() == [
        "            reward accuracy length trunc.      KL entropy tok/s/rank s/step    left",
        "step 1/12    0.500    0.250  31.50  0.125  0.0020   1.500      1.23k    2.0",
        "            val/easy/accuracy=0.750",
        "step 3/12    0.500    0.250  31.50  0.125  0.0020   1.500      1.23k    2.0 0:00:27",
        "            val/easy/accuracy=0.750",
        # A new column needs a new header, and a metric that the step lacks is a dash.
        "            reward    loss accuracy length trunc.      KL entropy tok/s/rank s/step    left",
        "step 4/12        -   0.500        -      -      -   0.250       -          -    1.0 0:00:16",
    ]


def test_an_evaluation_before_the_first_step_has_one_line() -> None:
    display, _, text = displayed()
    display.begin_steps(12)
    display.step(0, {"val/easy/accuracy": 0.75, "time/step_seconds": 1.0})
    assert text.getvalue() == "step 0/12   val/easy/accuracy=0.750\n"


def test_a_heldout_reward_is_shown_unless_it_equals_the_accuracy() -> None:
    display, _, text = displayed()
    row = {"val/game/unjudged": 1.0, "val/game/reward/mean": -0.25, "time/step_seconds": 1.0}
    display.step(0, row | {"val/easy/accuracy": 0.75, "val/easy/reward/mean": 0.75})
    assert text.getvalue().split()[2:] == ["val/easy/accuracy=0.750", "val/game/reward/mean=-0.250"]
    display.close(Closing(None, {"val/game/reward/mean": (-0.25, 0.5)}, {}, []))
    assert "reward    game -0.25 -> 0.5" in text.getvalue()


@pytest.mark.parametrize("name", ["distillation/divergence", "distillation/reverse_kl"])
def test_a_distillation_s_line_begins_with_what_it_learns(name: str) -> None:
    display, _, text = displayed()
    display.begin_steps(12)
    display.step(1, ROW | {name: 0.125})
    header, line = text.getvalue().splitlines()[:2]
    assert header.split()[:2] == ["diverg.", "reward"] and line.split()[2:4] == ["0.125", "0.500"]


EXTREME = {
    "distillation/divergence": -1.24e-7, "reward/mean": -123456.0, "reward/accuracy": 0.0,
    "rollout/completion_tokens/mean": 123456.7, "rollout/truncated": 1e-4, "kl/reference": -0.01234,
    "logprob_gap/mean": 1e-9, "train/entropy": float("nan"), "perf/tokens_per_second_per_rank": 1.107e7,
    "time/step_seconds": 98765.4,
}  # fmt: skip


@pytest.mark.parametrize("steps", [9, 200, 1_000_000, None])
def test_lines_have_at_most_100_columns_and_align(steps: int | None) -> None:
    display, clock, text = displayed()
    display.begin_steps(steps)
    names = {f"val/a_long_name_of_set_{number}/accuracy": 0.5 for number in range(5)}
    for number, row in enumerate([EXTREME, ROW | EXTREME | names, ROW | {"distillation/divergence": 2.0}], start=1):
        display.step(number, row)
        clock.now += 12345
    lines = [line for line in text.getvalue().splitlines() if not line.startswith("about ")]
    assert max(map(len, lines)) <= 100
    header, *numbers = [line for line in lines if "accuracy=" not in line]
    ends = [match.end() for match in re.finditer(r"\S+", header)]
    assert len(numbers) == 3
    for line in numbers:
        # Each value ends below the end of its label. The time left may be unknown.
        assert all(line[end - 1] != " " for end in ends[:-1])
        assert all(line[end : end + 1] in ("", " ") for end in ends)
    assert sum(line.count("accuracy=") for line in lines) == 7


def test_a_narrow_terminal_has_fewer_columns() -> None:
    lines = StepTable().lines(1, ROW, 1.0, max_characters=60)
    assert lines[0].split() == ["reward", "accuracy", "length", "trunc.", "s/step", "left"]
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_a_terminal_of_any_width_has_one_line_for_the_numbers_of_a_step(columns: int) -> None:
    program = f"""
from megarl.tracking.display import Display

display = Display()
display.begin_steps(200)
with display.live():
    for step in (1, 2):
        display.step(step, {ROW!r})
"""
    code, written = run_in_terminal([sys.executable, "-c", program], ROOT, columns=columns)
    assert code == 0, written
    lines = [line.rstrip() for line in shown(written) if line.strip()]
    assert [line.split()[0] for line in lines] == [
        "reward",
        "step",
        "val/easy/accuracy=0.750",
        "step",
        "val/easy/accuracy=0.750",
    ]
    assert max(map(len, lines)) <= min(columns, 100)


def test_the_header_returns_every_20_steps() -> None:
    display, _, text = displayed()
    display.begin_steps(50)
    for step in range(1, 51):
        display.step(step, {"reward/mean": 0.5, "time/step_seconds": 1.0})
    headers = [number for number, line in enumerate(text.getvalue().splitlines()) if "reward" in line]
    assert headers == [0, 21, 42]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.00012345, "1.2e-4"), (0.0009999, "1.0e-3"), (0.0123, "0.0123"), (0.25, "0.250"),
        (-0.25, "-0.250"), (9.99999, "10.00"), (31.5, "31.50"), (999.9, "999.9"), (999.96, "1.00k"), (2700.0, "2.70k"),
        (11070.0, "11.1k"),
        (999_700.0, "1.00M"), (1.107e7, "11.1M"), (-123456.0, "-123k"), (2e20, "2.0e+20"), (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.4, "0:00:00"),
        (35_999.4, "9:59:59"),
        (36_000.0, "10.0 h"),
        (359_000, "99.7 h"),
        (1e6, "11.6 d"),
        (1e9, "11.6k d"),
    ],
)
def test_the_time_left_is_short(seconds: float | None, text: str) -> None:
    assert left_text(seconds) == text


def test_a_log_has_the_lines_of_the_screen_without_colours(tmp_path: Path) -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=120, highlight=False, force_terminal=True))
    log = tmp_path / "driver.log"
    display.info("before")
    with display.logged_to(log):
        display.begin_steps(2)
        display.step(1, ROW)
        display.warn("a \x1b]0;owned\x07name")
        display.close(Closing(None, {}, {}, ["megarl report runs/a"]))
    display.info("after")
    screen = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()).splitlines()
    assert "\x1b[1m" in text.getvalue() and screen[0] == "before" and screen[-1] == "after"
    assert log.read_text(encoding="utf-8").splitlines() == screen[1:-1]
    assert "warning: a name" in screen


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("data.train: no such file"), "error: data.train: no such file"),
        (KeyError("x"), "error: KeyError('x')"),
    ],
)
def test_the_last_line_of_a_log_is_the_error_that_ended_the_run(tmp_path: Path, error: Exception, line: str) -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=120))
    log = tmp_path / "driver.log"
    with pytest.raises(type(error)), display.logged_to(log):
        display.info("before")
        raise error
    assert log.read_text(encoding="utf-8").splitlines() == ["before", line]
    assert "error" not in text.getvalue()


def test_the_live_line_counts_down_and_shows_the_course_of_the_reward() -> None:
    display, clock, _ = displayed()
    display.begin_steps(10)
    with display.phase("reading data"):
        clock.now += 3
        assert display.status().plain[3:] == "reading data 3 s"
        with display.phase("parts"):
            clock.now += 1
            assert display.status().plain[3:] == "parts 1 s"
        assert display.status().plain[3:] == "reading data 4 s"
    for step in range(1, 6):
        display.step(step, {"reward/mean": step / 8, "time/step_seconds": 10.0})
        clock.now += 10
    display.begin_step(6)
    with display.phase("train"):
        clock.now += 4
        assert display.status().plain[3:] == "step 6/10  train 4 s  0:00:36 left  ▁▃▅▆█ 0.625"
    display.step(6, {"reward/mean": float("nan"), "time/step_seconds": 10.0})
    assert display.status().plain.endswith("▁▃▅▆█ 0.625")


def test_a_narrow_terminal_without_unicode_has_a_live_line_too() -> None:
    written = io.BytesIO()
    console = Console(file=io.TextIOWrapper(written, encoding="ascii"), width=30, force_terminal=True)
    display = Display(console)
    for step in range(1, 6):
        display.step(step, {"reward/mean": step / 8, "time/step_seconds": 10.0})
    with display.phase("a phase whose name is longer than the line"):
        console.print(display.status())
    console.file.flush()
    assert b"a phase whose name" in written.getvalue()


def lines_of(steps: int, row: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The steps that have a line in a run of so many."""
    display, _, text = displayed()
    display.begin_steps(steps)
    for step in range(1, steps + 1):
        display.step(step, {"time/step_seconds": 1.0, **row.get(step, {})})
    return [int(number) for number in re.findall(r"^step (\d+)/", text.getvalue(), re.MULTILINE)]


def test_long_runs_have_fewer_lines() -> None:
    assert lines_of(MOST_LINES, {}) == list(range(1, MOST_LINES + 1))
    evaluated = {7: {"val/easy/accuracy": 0.5}}
    assert lines_of(10 * MOST_LINES, evaluated) == [1, 2, 7, *range(10, 10 * MOST_LINES + 1, 10)]


@pytest.mark.parametrize(
    ("steps", "resumed_step", "last", "summary"),
    [
        (100, 0, 100, "100 steps in"),
        (100, 80, 100, "steps 81 to 100 in"),
        (100, 100, None, "no step after 100 in"),
        (100, 100, 100, "no step after 100 in"),
        (0, 0, None, "evaluation in"),
    ],
)
def test_a_summary_has_the_steps_of_its_attempt(steps: int, resumed_step: int, last: int | None, summary: str) -> None:
    display, _, text = displayed()
    display.begin_steps(steps)
    if last is not None:
        display.step(last, {"time/step_seconds": 1.0})
    text.truncate(0)
    display.close(Closing(None, {}, {}, [], resumed_step))
    assert text.getvalue().replace("\0", "").startswith(f"done      {summary} 0:00:00")


def test_a_summary_closes_the_run() -> None:
    display, clock, text = displayed()
    display.step(40, {"time/step_seconds": 1.0})
    clock.now += 3725
    phases = {"train": 25.0, "rollout": 75.0, "export": 0.0}
    display.close(Closing("runs/a/hf", {"val/easy/accuracy": (0.25, 0.75)}, phases, ["megarl report runs/a", "more"]))
    assert text.getvalue().splitlines()[2:] == [
        "done      40 steps in 1:02:05",
        "model     runs/a/hf",
        "accuracy  easy 0.25 -> 0.75",
        "time      rollout 75.0 s (75%), train 25.0 s (25%)",
        "next      megarl report runs/a",
        "          more",
    ]
