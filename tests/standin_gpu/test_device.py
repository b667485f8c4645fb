"""The device of the stand-in: memory limit, streams, events, graphs, and errors for what CUDA forbids."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.standin_gpu

GIB = 1 << 30


@pytest.fixture(autouse=True)
def freed_cache() -> None:
    torch.cuda.empty_cache()


def test_properties_are_those_of_the_file() -> None:
    found = torch.cuda.get_device_properties(0)
    assert (found.name, found.major, found.multi_processor_count) == ("NVIDIA H200", 9, 132)
    assert found.total_memory == torch.cuda.mem_get_info(0)[1] == 150754820096
    assert torch.cuda.device_count() == 2


def test_more_than_the_memory_is_an_error_of_torch() -> None:
    held = torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"140\.40 GiB of which 39\.90 GiB is free"):
        torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")
    # The other device has its own.
    torch.empty(60 * GIB, dtype=torch.uint8, device="cuda:1")
    del held
    torch.cuda.empty_cache()
    torch.empty(60 * GIB, dtype=torch.uint8, device="cuda")


def test_processes_share_the_memory_of_a_device() -> None:
    held = torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    program = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    found = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert found < 150754820096 - held.nbytes


def test_an_unknown_function_reports_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    assert runtime.cudaMallocArray(None, None, 1, 1, 0) == 801
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    assert b"cudaMallocArray is not imitated" in runtime.cudaGetErrorString(801)
    assert "cudaMallocArray is not imitated" in capfd.readouterr().err


def test_streams_and_events() -> None:
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    pinned = torch.arange(8.0).pin_memory()
    assert pinned.is_pinned()
    with torch.cuda.stream(stream):
        begin.record()
        copied = pinned.to("cuda", non_blocking=True)
        end.record()
    torch.cuda.current_stream().wait_event(end)
    assert copied.tolist() == list(range(8))
    assert end.query()
    assert begin.elapsed_time(end) >= 0


def test_an_event_of_another_devices_stream_is_an_error() -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    event, stream = ctypes.c_void_p(), ctypes.c_void_p(torch.cuda.Stream(1).cuda_stream)
    assert torch.cuda.current_device() == 0
    assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), 0) == 0
    assert runtime.cudaEventRecord(event, stream) == 400
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    assert b"event of device 0 recorded on a stream of device 1" in runtime.cudaGetErrorString(400)
    runtime.cudaGetLastError()


def test_a_graph_computes_again_at_replay() -> None:
    inputs = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = inputs * 2 + 1
        result = doubled.clone().sort(descending=True).values
    for value in (9, 4):
        inputs.copy_(torch.tensor([value, value + 1, value + 2]))
        graph.replay()
        assert result.tolist() == [2 * value + 5, 2 * value + 3, 2 * value + 1]


def test_a_capture_changes_no_memory() -> None:
    counter, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        counter[0] = counter[1] * 10
    assert counter.tolist() == [0, 0, 0]
    for _ in range(2):
        graph.replay()
    assert counter.tolist() == [20, 2, 2]


@pytest.mark.parametrize("call", ["values.sum().item()", "values.nonzero()", "values[values > 0]", "values.cpu()"])
def test_a_synchronisation_in_a_capture_is_an_error(call: str) -> None:
    # In a process of its own: torch's allocator counts a capture that failed as under way until its end.
    program = f"""
import torch
values = torch.ones(3, device="cuda")
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    {call}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "graph capture" in done.stderr or "stream is captured" in done.stderr, done.stderr


def test_memory_that_was_freed_is_an_error() -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    address, host = ctypes.c_void_p(), ctypes.create_string_buffer(8)
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4096)) == 0
    assert runtime.cudaMemcpy(host, address, ctypes.c_size_t(8), 2) == 0
    assert runtime.cudaFree(address) == 0
    assert runtime.cudaMemcpy(host, address, ctypes.c_size_t(8), 2) == 700
    runtime.cudaGetLastError()
