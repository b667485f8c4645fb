"""A GPU of round speeds and constants without any fixed time, so that expected seconds can be typed in."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megarl.families.published import PUBLISHED
from megarl.families.shape import ModelShape, shape_from_config
from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds


@pytest.fixture
def bare() -> Constants:
    """Every share is 1, every fixed time and every half of an efficiency is 0."""
    shares = {"gemm_efficiency", "link_efficiency", "decode_bandwidth", "blackwell_efficiency", "grace_seconds"}
    return Constants(**{field.name: float(field.name in shares) for field in fields(Constants)})


@pytest.fixture
def gpu() -> GpuSpeeds:
    return GpuSpeeds(flops=1e15, memory=4e12, memory_bytes=1e11, nvlink=4e11, network=5e10)


@pytest.fixture
def dense() -> ModelShape:
    return shape_from_config(dict(PUBLISHED["Qwen/Qwen3-14B"]))


@pytest.fixture
def experts() -> ModelShape:
    return shape_from_config(dict(PUBLISHED["Qwen/Qwen3-30B-A3B"]))
