"""The check of collectives on two tiny models, and the imagined device that it runs on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.distributed
@pytest.mark.long
def test_all_ranks_of_tiny_models_agree_and_faults_are_named(tmp_path: Path) -> None:
    """Dense models and experts, on tp, cp, pp, dp, ep and vpp of 1 to 4. All eight ranks are traced.

    The check compares each rank with the first one of equal work. That proves the rule by which large jobs are traced.
    """
    file = tmp_path / "rows.jsonl"
    # A process of its own: its Megatron is patched for the imagined device, this one's for the CPU.
    command = [sys.executable, "-W", "ignore", "tools/check.py", "collectives", "--size", "small", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["case"], row["phase"]): row for row in map(json.loads, file.read_text().splitlines())}
    for case in ("tiny dense", "tiny experts", "tiny chunks", "tiny spread experts"):
        step = rows[case, "step"]
        assert step["findings"] == 0 and step["traced"] == step["ranks"] == 8 and step["calls"] > 1000
        assert rows[case, "reshard"]["findings"] == 0 and rows[case, "reshard"]["calls"] > 0
        skipped, swapped = rows[case, "a skipped call"], rows[case, "swapped calls"]
        assert skipped["calls"] == step["calls"] - 1
        assert "differs: rank 7 has" in skipped["first"] and ".py:" in skipped["first"]
        assert "wait for each other" in swapped["first"] and "rank 7 waits in call" in swapped["first"]


_DEVICE = """
import torch
from tools.collectives.imagined_device import imagined_device

with imagined_device():
    counts = torch.tensor([3, 0, 5], device="meta")
    chosen = torch.zeros(4, 6, device="meta").int().scatter(1, counts[None, :2].expand(4, 2), 1).bool()
    hidden = torch.empty(4, 6, device="meta", requires_grad=True)
    print(counts.is_meta, (counts * 2)[1:].tolist(), counts.sum().item(), chosen.sum(0).tolist())
    # The size of the result follows from known truth values, its numbers are unknown: they are read as zero.
    picked = hidden.masked_select(chosen)
    picked.sum().backward()
    print(tuple(picked.shape), picked.is_meta, picked.sum().item(), tuple(hidden.grad.shape))
    # A write of unknown numbers makes known ones unknown.
    known = torch.ones(3, device="meta")
    before = known.tolist()
    known.add_(hidden[0, :3].detach())
    print(before, known.tolist())
    # Unknown scores choose all places equally often.
    print(torch.topk(hidden, 3, dim=1)[1].flatten().cpu().bincount().tolist())
    try:
        (hidden > 0).nonzero()
    except NotImplementedError as error:
        print("refused", "unknown" in str(error))
"""


@pytest.mark.long
@pytest.mark.distributed
def test_numbers_that_steer_the_host_are_known_on_the_imagined_device() -> None:
    done = subprocess.run([sys.executable, "-c", _DEVICE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "True [0, 10] 8 [4, 0, 0, 4, 0, 0]",
        "(8,) True 0.0 (4, 6)",
        "[1.0, 1.0, 1.0] [0.0, 0.0, 0.0]",
        "[2, 2, 2, 2, 2, 2]",
        "refused True",
    ], done.stderr
