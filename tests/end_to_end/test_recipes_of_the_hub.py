"""Recipes with data sets of the Hub read records of these sets' shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end
ROOT = Path(__file__).resolve().parents[2]


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]


GSM8K = {"question": "Ann has 2 clips and buys 3. How many?", "answer": "She has 2 + 3 = <<2+3=5>>5.\n#### 5"}
ULTRACHAT = {"prompt": "Hi", "prompt_id": "1", "messages": turns("Hi", "Hello", "And you?", "Fine")}
ULTRAFEEDBACK = {
    "prompt": "Hi", "prompt_id": "1", "chosen": turns("Hi", "Hello"), "rejected": turns("Hi", "No"),
    "messages": turns("Hi", "Hello"), "score_chosen": 8.0, "score_rejected": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "record", "expected"),
    [
        (("qwen3_0_6b_gsm8k", "qwen3_8b_distillation"), GSM8K, "1 problems"),
        (("qwen3_8b_sft",), ULTRACHAT, "1 conversations"),
        (("qwen3_8b_dpo",), ULTRAFEEDBACK, "1 pairs"),
    ],
)
def test_a_recipe_reads_its_data_set(
    names: Sequence[str],
    record: Mapping[str, Any],
    expected: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record) + "\n")
    for name in names:
        recipe = yaml.safe_load((ROOT / f"launch/recipes/{name}.yaml").read_text())
        recipe["model"]["path"] = str(tiny_model())
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = run_megarl("data", "check", data, "--recipe", tmp_path / "recipe.yaml")
        assert done.returncode == 0 and f"{expected}, " in done.stdout and "; 0 more have errors" in done.stdout
