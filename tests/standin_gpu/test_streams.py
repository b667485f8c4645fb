"""Checks between streams that a GPU does not make: each work on memory must be known to be done before the next."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

pytestmark = [
    pytest.mark.standin_gpu,
    pytest.mark.skipif("STANDIN_GPU_STRICT" not in os.environ, reason="not a strict run of the stand-in"),
]
COUNT = 1 << 20


@pytest.fixture(autouse=True)
def waited() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def test_a_read_without_a_wait_is_an_error() -> None:
    side, values = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.add_(1)
    with pytest.raises(RuntimeError, match=r"missing wait: aten::mul.* at .*test_streams\.py:\d+ on stream .* reads .*"
                       r"which aten::add_.* at .*test_streams\.py:\d+ on stream \d+ writes"):  # fmt: skip
        values * 2
    torch.cuda.current_stream().wait_stream(side)
    assert (values * 2).sum().item() == 2 * COUNT


def test_a_write_without_a_wait_for_readers_is_an_error() -> None:
    side, values = torch.cuda.Stream(), torch.ones(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = values.sum()
    with pytest.raises(RuntimeError, match=r"missing wait: aten::zero_.* writes .*aten::sum.* reads"):
        values.zero_()
    torch.cuda.current_stream().wait_stream(side)
    values.zero_()
    assert total.item() == COUNT


@pytest.mark.parametrize("wait", ["event", "query", "stream", "device"])
def test_each_kind_of_wait_counts(wait: str) -> None:
    side, done, values = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(COUNT, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.add_(1)
        done.record()
    if wait == "event":
        torch.cuda.current_stream().wait_event(done)
    elif wait == "query":
        while not done.query():
            time.sleep(0.01)
    elif wait == "stream":
        side.synchronize()
    else:
        torch.cuda.synchronize()
    assert values.sum().item() == COUNT


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_another_stream_uses_is_not_given_away(is_recorded: bool) -> None:
    """`record_stream` keeps the allocator from it; without that, the next tensor there is an error."""
    side, values = torch.cuda.Stream(), torch.ones(COUNT, device="cuda")
    address = values.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = values.sum()
    if is_recorded:
        values.record_stream(side)
    del values
    if is_recorded:
        torch.full((COUNT,), 7.0, device="cuda")
    else:
        with pytest.raises(RuntimeError, match=r"missing wait: .*writes .*aten::sum.* reads"):
            torch.full((COUNT,), 7.0, device="cuda")
        assert torch.empty(COUNT, device="cuda").data_ptr() == address
    side.synchronize()
    assert total.item() == COUNT


def test_a_pinned_copy_is_late_until_something_waits() -> None:
    values, host = torch.ones(COUNT, device="cuda"), torch.zeros(COUNT).pin_memory()
    started = time.monotonic()
    host.copy_(values, non_blocking=True)
    assert time.monotonic() - started < 0.4
    torch.cuda.current_stream().synchronize()
    assert host.sum().item() == COUNT


EARLY_READ = """
import torch
host = torch.zeros(5).pin_memory()
host.copy_(torch.ones(5, device="cuda"), non_blocking=True)
print(host.sum())
"""


def test_an_early_read_of_a_pinned_copy_ends_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY_READ], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "early read: the host reads pinned memory at" in done.stderr
    assert "which a copy at <string>:4 on stream" in done.stderr and '"<string>", line 5' in done.stderr


def test_pinned_memory_that_is_changed_too_early_shows() -> None:
    host = torch.ones(COUNT).pin_memory()
    copied = host.to("cuda", non_blocking=True)
    host.zero_()
    assert copied.sum().item() == 0


def test_work_on_the_default_stream_beside_torchs_current_one_is_an_error() -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    with torch.cuda.stream(torch.cuda.Stream()):
        values = torch.ones(COUNT, device="cuda")
        address = ctypes.c_void_p(values.data_ptr())
        assert runtime.cudaMemsetAsync(address, 0, ctypes.c_size_t(4), None) == 400
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        assert b"a fill on the default stream of device 0" in runtime.cudaGetErrorString(400)
        runtime.cudaGetLastError()
        torch.cuda.current_stream().synchronize()
        assert runtime.cudaMemsetAsync(address, 0, ctypes.c_size_t(4), None) == 0
        torch.cuda.synchronize()
        assert values.sum().item() == COUNT - 1


def test_a_replay_counts_as_work_on_its_memory() -> None:
    values, graph, side = torch.zeros(COUNT, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        values.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    with pytest.raises(RuntimeError, match=r"missing wait: aten::sum.* reads .*aten::add_.* writes"):
        values.sum()
    torch.cuda.current_stream().wait_stream(side)
    assert values.sum().item() == COUNT
