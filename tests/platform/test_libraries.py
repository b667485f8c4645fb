"""The choice between CUDA and a CPU for Megatron-Core and vLLM."""

from __future__ import annotations

import sys

import pytest
import torch

from megarl.platform import libraries

PATCHES = ("megarl.platform.cpu.megatron_patches", "megarl.platform.cpu.vllm_patches")


def test_no_patch_for_a_cpu_is_loaded_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in PATCHES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    libraries.prepare_megatron()
    libraries.prepare_hybrid_optimizer()
    libraries.prepare_vllm()
    assert libraries.vllm_arguments(4096) == {}
    assert not sys.modules.keys() & set(PATCHES)


def test_an_engine_on_a_cpu_prefills_in_one_piece() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    arguments = libraries.vllm_arguments(10_000)
    assert arguments["max_num_batched_tokens"] == 10_000 and not arguments["enable_chunked_prefill"]
