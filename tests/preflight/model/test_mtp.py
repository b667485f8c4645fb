"""Layers for multi-token prediction (MTP): what cannot be trained, or cannot draft, is one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megarl.config import Recipe
from megarl.preflight import check
from megarl.types import ConfigError, DataError

LOSS = {"mtp_loss_coefficient": 0.1}
DRAFTS = {"vllm": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}}


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        family="glm4_moe", num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=32, num_layers=2, num_mtp_layers=1
    )


def faults(recipe: Recipe) -> list[str]:
    try:
        check(recipe, is_start=False)
    except (ConfigError, DataError) as error:
        return [line.strip() for line in str(error).split("\n")[1:]] or [str(error)]
    return []


@pytest.mark.parametrize("rollout", [{}, DRAFTS])
def test_a_model_with_the_layers_trains_them_and_drafts(
    recipe: Callable[..., Recipe], folder: Path, rollout: dict[str, Any]
) -> None:
    assert faults(recipe(model={"path": str(folder)}, trainer=LOSS, rollout=rollout)) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {}, "rollout": DRAFTS}, "set trainer.mtp_loss_coefficient=0.1"),
        ({"rollout": DRAFTS, "model": {"override_config": {"rope_theta": 5e5}}}, "would ignore model.override_config"),
        ({"lora": {"rank": 4}}, "trainer.mtp_loss_coefficient = 0.1: with lora.rank = 4 only adapters are trained"),
        ({"trainer": LOSS | {"router_replay": True}}, "no experts of MTP layers to replay"),
        ({"trainer": LOSS | {"megatron": {"moe_aux_loss_coeff": 0.1}}}, "trainer.megatron.moe_aux_loss_coeff = 0.1"),
        ({"trainer": LOSS | {"megatron": {"mtp_num_layers": 1}}}, "trainer.megatron.mtp_num_layers"),
    ],
)
def test_what_does_not_fit_is_one_error(
    recipe: Callable[..., Recipe], folder: Path, sections: dict[str, Any], expected: str
) -> None:
    model = {"path": str(folder)} | sections.get("model", {})
    (text,) = faults(recipe(**({"trainer": LOSS} | sections | {"model": model})))
    assert expected in text


def test_a_family_without_the_layers_is_named(recipe: Callable[..., Recipe]) -> None:
    (text,) = faults(recipe(trainer=LOSS))
    assert text.startswith("trainer.mtp_loss_coefficient = 0.1: trained draft layers are supported for deepseek_v3, ")
    assert "only, not for qwen3; leave it out" in text


def test_a_model_without_the_layers_is_named(recipe: Callable[..., Recipe], folder: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(folder, tmp_path / "none"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    file = changed / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".layers.2." not in name}, file)
    (text,) = faults(recipe(model={"path": str(changed)}, trainer=LOSS))
    assert "num_nextn_predict_layers in config.json is 0; only 1 can be trained; leave it out" in text


def test_missing_tensors_of_the_layers_are_named(recipe: Callable[..., Recipe], folder: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(folder, tmp_path / "missing"))
    file = changed / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "eh_proj" not in name}, file)
    assert faults(recipe(model={"path": str(changed)})) == []
    texts = faults(recipe(model={"path": str(changed)}, trainer=LOSS))
    assert any("tensor model.layers.2.eh_proj.weight is missing" in text for text in texts)
