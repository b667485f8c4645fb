"""Chat templates tried on conversations: which only append, which rewrite, which refuse."""

from __future__ import annotations

import pytest

from megarl.data.templates.history import history_faults, history_notice
from tests.data.templates import tokenizer_of

DROPS = "rewrites history"
EXPECTED: dict[str, dict[str, str]] = {
    "chatml": {},
    "qwen": {},
    "forgetful": {"reasoning, then user": DROPS, "tools, then user": DROPS},
    "llama": {"parallel tools": "refuses"},
    "deepseek": {},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_faults_of_templates(family: str) -> None:
    assert history_faults(tokenizer_of(family)) == EXPECTED[family]


def test_the_start_of_a_run_tells_what_the_field_means() -> None:
    assert "only appends" in history_notice({}, "append")
    assert "It refuses: parallel tools" in history_notice(EXPECTED["llama"], "append")
    assert "rollout.history=render follows the template" in history_notice(EXPECTED["forgetful"], "append")
    assert "a training sequence of its own" in history_notice(EXPECTED["forgetful"], "render")
