"""No number of before a copy survives the fill: floating-point ones become NaN, integers of several bytes -1."""

from __future__ import annotations

import pytest
import torch

from megarl.reshard.checks.nan_fill import fill_with_nan, has_nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_every_element_is_replaced(dtype: torch.dtype) -> None:
    parameter = torch.ones(3, 4).to(dtype)
    assert not has_nan(parameter)
    fill_with_nan(parameter)
    if dtype == torch.int32:
        assert (parameter == -1).all() and not has_nan(parameter)
    else:
        assert has_nan(parameter[:1, :1]) and has_nan(parameter[2:, 3:])
    if dtype.is_floating_point:
        assert parameter.float().isnan().all()
