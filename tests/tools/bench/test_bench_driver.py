"""The driver's benchmark runs for real, in miniature: messages and bytes are as expected; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"
RANKS, SAMPLES, TOKENS = 32, 64, 800


@pytest.mark.long
def test_a_step_of_thirty_two_ranks_sends_what_it_should() -> None:
    command = [
        sys.executable,
        str(BENCH / "driver.py"),
        "--no-limits",
        "--ranks",
        str(RANKS),
        "--samples",
        str(SAMPLES),
    ]
    command += ["--tokens", str(TOKENS), "--steps", "1", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    lines = {line["metric"]: line for line in map(json.loads, (line for line in printed if line.startswith("{")))}
    with_target = {"driver_cpu_per_call", "driver_cpu_of_rows", "driver_cpu_of_start"}
    assert {name for name, line in lines.items() if line["target"]} == with_target
    assert "4 agents" in lines["driver_cpu_per_call"]["against"]
    num_tokens = int(lines["driver_cpu_of_rows"]["against"].split()[2])
    assert num_tokens == pytest.approx(SAMPLES * TOKENS, rel=0.1)
    assert lines["memory_rank_pss"]["value"] < lines["memory_rank_rss"]["value"] < 200e6

    rows = [line.split() for line in printed if line.startswith(("start", "call", "advance", "step"))]
    messages = {name: int(number) for name, *_, number, _, _ in rows}
    megabytes = {name: (float(sent), float(received)) for name, *_, sent, received in rows}
    assert messages["start"] == 3 * RANKS  # __listen__, __settle__, __init__
    assert messages["call"] == messages["advance"] == RANKS
    # advance, sleep_engine, forward, update, peak_tflops, __activity__, engine_metrics, reshard
    assert messages["step"] == 8 * RANKS
    # Token ids, mask and arrays of float32 go out once, to the first rank of a replica; log-probs come back.
    sent, received = megabytes["step.update"]
    assert 25 <= sent * 1e6 / num_tokens <= 40 and received < 0.1
    sent, received = megabytes["step.logprobs"]
    assert 9 <= sent * 1e6 / num_tokens <= 12 and received * 1e6 / num_tokens == pytest.approx(4, rel=0.1)


def test_a_target_that_is_missed_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.bench import driver

    monkeypatch.setattr(driver, "LIMITS", {"driver_cpu_of_start": "<= 0"})
    small = ["--ranks", "2", "--per-node", "2", "--samples", "16", "--tokens", "600", "--steps", "1", "--repeats", "1"]
    assert driver.main(small) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["metric"] for line in lines if line["met"] is False] == ["driver_cpu_of_start"]
