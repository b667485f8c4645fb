"""tools/gpu_quarter.py: its list, its lines, its limits and its resumption, with items that cost nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_quarter
from tools.bench.measured import run_plan, traces
from tools.bench.parts import device_parts
from tools.bench.quarter import item_choice, quarter_items, quarter_sizes

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, time
from tools.bench.quarter.item_lines import ItemLines, LeftOutError, options_of
from tools.bench.parts.budget import Budget

options = options_of(None)
lines = ItemLines(options.items, Budget(options.budget_seconds))
for name in options.items:
    if lines.wants(name):
        with lines.measuring(name):
            lines.write(f"of_{name}", [3.0, 1.0, 2.0], "s", against="a clock")
            if name == "fails":
                for number in range(2):
                    log = options.work / f"group_{number}/logs/rank_0.log"
                    log.parent.mkdir(parents=True)
                    log.write_text(f"of group {number}")
                raise ValueError("as planned")
            if name == "crashes":
                print("last words", flush=True)
                os._exit(3)
            if name == "hangs":
                time.sleep(60)
            if name == "absent":
                raise LeftOutError("no such setting")
"""
RUN = """
import sys
sys.path[:0] = [{root!r}]
from tools import gpu_quarter
from tools.bench.quarter.quarter_items import Item, Program
cheap = Program("cheap", [{program!r}], {{"tiny": 8.0}})
gpu_quarter.ITEMS = [Item(name, cheap, "", {{"tiny": seconds}}) for name, seconds in {items!r}]
raise SystemExit(gpu_quarter.main(sys.argv[1:]))
"""


@pytest.fixture
def quarter(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`quarter({"first": 1.0}, *options)` starts a call for items with these usual seconds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(items: dict[str, float], *options: str) -> subprocess.Popen[str]:
        text = RUN.format(root=str(ROOT), program=str(program), items=list(items.items()))
        arguments = ["--size", "tiny", "--device", "cpu", "--out", str(tmp_path / "out.jsonl"), *options]
        return subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)

    return start


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def statuses(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["item"], line["status"]) for line in lines if "status" in line]


def test_one_item_does_not_end_the_others(quarter: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    items = dict.fromkeys(["first", "fails", "crashes", "absent", "hangs", "last"], 1.0)
    # The folder of the logs lies in the one that they are copied from.
    call = quarter(items, "--limit", "1.5", "--work", str(tmp_path))
    table, _ = call.communicate(timeout=120)
    lines = lines_of(tmp_path)
    assert lines[0].keys() >= {"call", "machine", "versions", "commit", "size", "device", "python", "items", "at"}
    assert lines[0]["machine"]["cores"] > 0 and lines[0]["items"] == list(items)
    assert statuses(lines) == [
        ("first", "done"), ("fails", "failed"), ("crashes", "failed"), ("absent", "left out"), ("hangs", "failed"),
        ("last", "done"),
    ]  # fmt: skip
    why = {line["item"]: line.get("why", "") for line in lines if "status" in line}
    assert why["fails"] == "ValueError: as planned" and why["absent"] == "no such setting"
    assert "exit code 3" in why["crashes"] and "last words" in why["crashes"] and "limit of 2 s" in why["hangs"]
    numbers = {line["item"]: line for line in lines if "metric" in line}
    assert numbers.keys() == items.keys()
    assert numbers["last"] | {"at": 0} == {
        "item": "last", "metric": "of_last", "value": 2.0, "unit": "s", "spread": [1.0, 2.0, 3.0],
        "against": "a clock", "at": 0,
    }  # fmt: skip
    assert call.returncode == 1
    assert re.search(r"last +of_last +2 +1 +3 +3 +s +a clock", table) and "fails: failed: ValueError" in table
    retained = {path.read_text() for path in (tmp_path / "out.logs").rglob("rank_0.log")}
    assert retained == {"of group 0", "of group 1"}
    # The hanging item's log ends with the stack of its thread.
    assert any("in <module>" in log.read_text() for log in (tmp_path / "out.logs").glob("*.txt"))


def test_a_list_is_split_over_calls(quarter: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    items = {"long": 30.0, "short": 1.0, "longest": 500.0}
    options = ["--budget", "100", "--done", str(tmp_path / "out.jsonl")]
    first = quarter(items, *options, "--call-limit", "25")
    table, _ = first.communicate(timeout=60)
    assert first.returncode == 3 and "of --call-limit are left" in table and "of --budget are left" in table
    lines = lines_of(tmp_path)
    assert statuses(lines) == [("short", "done"), ("long", "no time"), ("longest", "no time")]
    # A line that was cut short, as by a full disk or a kill.
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"item": "lo')
        file.write("\n")
    second = quarter(items, *options, "--call-limit", "60")
    table, _ = second.communicate(timeout=60)
    [call] = [line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()[len(lines) + 1 :])
              if "call" in line]  # fmt: skip
    assert call["items"] == ["long", "longest"] and second.returncode == 3
    # Numbers of the earlier call are in the table of the last one.
    assert "of_short" in table and "of_long " in table


def test_seconds_of_earlier_calls_count(tmp_path: Path) -> None:
    lines = [
        {"call": "1", "at": 0.1}, {"item": "a", "status": "done", "at": 90.0}, {"item": "b", "metric": "m", "at": 95.0},
        {"call": "2", "at": 0.1}, {"item": "b", "status": "no time", "at": 20.0}, {"item": "c", "status": "failed"},
    ]  # fmt: skip
    file = tmp_path / "earlier.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"item": "d", "sta')
    earlier = gpu_quarter.Earlier.read([file])
    assert earlier.statuses == {"a": "done", "c": "failed"} and earlier.seconds == 115.0
    assert [line["item"] for line in earlier.numbers] == ["b"]


def test_a_killed_call_is_resumed(quarter: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    items = dict.fromkeys(["first", "hangs", "last"], 1.0)
    killed = quarter(items)
    out = tmp_path / "out.jsonl"
    deadline = time.monotonic() + 60
    while "of_hangs" not in (out.read_text() if out.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    output, _ = killed.communicate()
    [temporary] = set(map(Path, re.findall(r"--work (/tmp/\S+)/work", output)))
    assert temporary.is_dir()
    assert statuses(lines_of(tmp_path)) == [("first", "done")]
    program = str(tmp_path / "program.py").encode()
    while time.monotonic() < deadline and any(
        program in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(path)
    ):
        time.sleep(0.05)
    assert time.monotonic() < deadline, "the program outlived the call"
    resumed = quarter(items, "--done", str(out), "--limit", "1.5")
    table, _ = resumed.communicate(timeout=60)
    assert statuses(lines_of(tmp_path)) == [("first", "done"), ("hangs", "failed"), ("last", "done")]
    assert table.count("of_first") == table.count("of_hangs") == 1
    assert not temporary.exists()


def _is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def test_the_list_is_in_order_and_fits() -> None:
    items: tuple[Any, ...] = gpu_quarter.ITEMS
    names = [item.name for item in items]
    assert len(set(names)) == len(names) and names[:2] == ["ceilings", "fp8_training_test"]
    for item in items:
        assert item.seconds.keys() == {"h200", "tiny"} == item.program.start_seconds.keys()
        first = item.program.command[0]
        assert first == "-m" or Path(first).is_file()
    # A program starts once: its items follow each other.
    programs = [item.program.name for item in items]
    changes = [name for name, before in zip(programs, [None, *programs], strict=False) if name != before]
    assert len(set(changes)) == len(changes)


def test_usual_seconds_measure_the_list_in_the_order_of_its_value() -> None:
    """Two calls of 600 s in a budget of 780 s: none of the later items takes the time of an earlier one."""
    pending, measured = list(gpu_quarter.ITEMS), list[list[str]]()
    budget_seconds = gpu_quarter.BUDGET_SECONDS - gpu_quarter.END_SECONDS
    while not measured or measured[-1]:
        call_seconds, names = gpu_quarter.CALL_SECONDS - gpu_quarter.END_SECONDS, list[str]()
        while chosen := item_choice.choose_items(
            pending, "h200", call_seconds=min(call_seconds, budget_seconds), budget_seconds=budget_seconds,
            end_seconds=gpu_quarter.END_SECONDS,
        ):  # fmt: skip
            seconds = chosen[0].program.start_seconds["h200"] + sum(item.seconds["h200"] for item in chosen)
            call_seconds, budget_seconds = call_seconds - seconds, budget_seconds - seconds
            pending = [item for item in pending if item not in chosen]
            names += [item.name for item in chosen]
        budget_seconds -= gpu_quarter.END_SECONDS
        measured.append(names)
    in_order = [item.name for item in gpu_quarter.ITEMS]
    assert measured[0][:11] == in_order[:11] and measured[0][10] == "driver_and_vllm"
    assert [name for call in measured for name in call][:13] == in_order[:13] and in_order[12] == "rank_starts"


def test_only_a_rehearsal_bounds_the_batches_of_vllm() -> None:
    """The ratio to quote is against `vllm.LLM` with its defaults."""
    assert [name for name, size in quarter_sizes.SIZES.items() if size.vllm_limits] == ["tiny"]


def test_a_short_item_leaves_the_seconds_of_one_of_more_value() -> None:
    shared, single = (quarter_items.Program(name, [], {"tiny": 5.0}) for name in ("shared", "single"))
    pending = [
        quarter_items.Item(name, program, "", {"tiny": seconds})
        for name, program, seconds in (("a", shared, 40.0), ("b", shared, 30.0), ("c", single, 20.0))
    ]

    def names(call_seconds: float, budget_seconds: float) -> list[str]:
        chosen = item_choice.choose_items(
            pending, "tiny", call_seconds=call_seconds, budget_seconds=budget_seconds, end_seconds=1.0
        )
        return [item.name for item in chosen]

    # a and b need 75 s with one start, and one more for the end of another call; c needs 25 s.
    assert names(30.0, 101.0) == ["c"] and names(30.0, 100.0) == []
    assert names(75.0, 75.0) == ["a", "b"]
    # b does not fit with a, nor c; what cannot be measured at all reserves nothing.
    assert names(60.0, 60.0) == ["a"] and names(30.0, 35.0) == ["c"]


def test_every_gpu_test_is_in_one_item() -> None:
    """A new test that no item chooses is noticed. The expressions are words joined by `or`."""
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/gpu/test_gpu.py").read_text(), re.MULTILINE)
    commands = [item.program.command for item in gpu_quarter.ITEMS]
    chosen = [command[-1].split(" or ") for command in commands if "-k" in command]
    in_items = {test: sum(any(word in test for word in words) for words in chosen) for test in tests}
    assert in_items == dict.fromkeys(tests, 1) and len(tests) > 6


@pytest.mark.long
@pytest.mark.distributed
def test_ceilings_and_updates_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/gpu_quarter.py"), "--size", "tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path / "out.jsonl"), "--only", "ceilings", "update_short_rows", "update_profile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    metrics = {line["metric"] for line in lines_of(tmp_path) if "metric" in line}
    assert metrics >= {"gemm", "copy", "update", "update_tflops", "update_seconds", "update_profiled_seconds"}


@pytest.mark.parametrize(("capability", "has_fp8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)])
def test_products_of_fp8_are_left_out_on_older_gpus(capability: tuple[int, int], has_fp8: bool) -> None:
    reason = device_parts.explain_missing_fp8(capability)
    assert (reason is None) == has_fp8
    assert has_fp8 or ("8.9 (Ada) or newer" in reason and f"has {capability[0]}.{capability[1]}" in reason)


def test_a_trace_is_summed_up() -> None:
    def event(kind: str, name: str, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration}

    events = [
        event("cpu_op", "aten::mm", 0.0, 100.0), event("cuda_runtime", "cudaLaunchKernel", 10.0, 5.0),
        # The second kernel overlaps the first by 10: 40 of 100 microseconds are busy.
        event("kernel", "gemm", 20.0, 30.0), event("kernel", "gemm", 40.0, 20.0),
    ]  # fmt: skip
    summary = traces.summarise(events)
    assert summary["gpu_busy_share"] == 0.4 and summary["gpu_kernels"] == 2 and summary["launches"] == 1
    assert summary["seconds"] == 1e-4
    assert summary["kernels"] == [{"name": "gemm", "seconds": 5e-5, "count": 2}]
    assert traces.summarise(events[:2])["gpu_busy_share"] is None


def test_samples_of_nvidia_smi_are_means() -> None:
    samples = {
        "gpu_busy": [100.0, 50.0],
        "sm_clock_mhz": [1980.0, 1500.0],
        "power_watts": [],
        "temperature_celsius": [],
    }
    means = device_parts.means_of(samples)
    assert means == {"gpu_busy": 0.75, "sm_clock_mhz": 1740.0, "lowest_sm_clock_mhz": 1500.0}


def test_steps_with_states_of_other_settings_are_not_quoted() -> None:
    away, resident = run_plan.Settings(("optimizer",), "full"), run_plan.Settings((), "full")
    # 1 warms up; 3 brings back what 2 moved away; 5 moves away the first time what stayed.
    assert run_plan.clean_steps([away, away, resident, run_plan.Settings((), "none"), away, away]) == [2, 4, 6]
    assert {run_plan.PLAN[number - 1] for number in run_plan.clean_steps(run_plan.PLAN)} == set(run_plan.PLAN)
