"""Seed-OSS: what its page refuses."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.families.published import PUBLISHED
from megarl.families.shape import shape_from_config
from megarl.types import DataError

CONFIG = PUBLISHED["ByteDance-Seed/Seed-OSS-36B-Instruct"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": None}, "rope_theta is missing: transformers and vLLM 0.30 have different defaults"),
        ({"attention_bias": False}, "attention_bias is False; in vLLM 0.30 it is always True"),
        ({"attention_out_bias": True}, "attention_out_bias is True; in vLLM 0.30 it is always False"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
    ],
)
def test_values_that_engines_do_not_read_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(CONFIG | fields)
