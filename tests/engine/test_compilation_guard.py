"""The recipe's settings of vLLM's compilation are merged with megarl's, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.engine.compilation_guard import without_fused_all_reduce
from megarl.types import ConfigError

OFF = {"fuse_allreduce_rms": False}
OTHER = {"fuse_norm_quant": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(None, {"pass_config": OFF}, id="none"),
        pytest.param({}, {"pass_config": OFF}, id="empty"),
        pytest.param({"mode": 3}, {"mode": 3, "pass_config": OFF}, id="another setting"),
        pytest.param({"pass_config": None}, {"pass_config": OFF}, id="no passes"),
        pytest.param({"pass_config": OTHER}, {"pass_config": {**OTHER, **OFF}}, id="another pass"),
        pytest.param({"pass_config": OFF}, {"pass_config": OFF}, id="off already"),
        pytest.param({"pass_config": {"fuse_allreduce_rms": None}}, {"pass_config": OFF}, id="vLLM's default"),
    ],
)  # fmt: skip
def test_the_fused_kernel_is_off_beside_the_recipes_settings(settings: Any, expected: dict[str, Any]) -> None:
    before = repr(settings)
    assert without_fused_all_reduce(settings) == expected
    assert repr(settings) == before


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        pytest.param({"pass_config": {"fuse_allreduce_rms": True}}, "pass_config.fuse_allreduce_rms = True", id="on"),
        pytest.param({"pass_config": {"fuse_allreduce_rms": "on"}}, "pass_config.fuse_allreduce_rms = 'on'", id="word"),
        pytest.param({"pass_config": 3}, "pass_config = 3", id="passes are no table"),
        pytest.param("mode=3", "= 'mode=3'", id="no table"),
        pytest.param(3, "= 3", id="a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused(settings: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        without_fused_all_reduce(settings)
    separator = "" if field.startswith("=") else "."
    expected = f"rollout.vllm.compilation_config{separator or ' '}{field}: "
    assert str(caught.value).startswith(expected)
