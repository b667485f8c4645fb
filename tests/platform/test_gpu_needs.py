"""A recipe's number formats are refused on GPUs and libraries without them, and the message names these."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.platform.gpu_needs import generation, library_versions, needs, unmet_needs
from megarl.platform.visible_gpus import Capability, Gpu

SOUND = {"Transformer Engine": "2.11.0", "CUDA": "13.0"}


def unmet(recipe: Recipe, capability: Capability | None, versions: dict[str, str] | None) -> list[str]:
    return list(unmet_needs(needs(recipe), [Gpu("G", capability)] * 8, versions))


def made(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}} | sections)


BLOCKWISE = {"trainer": {"fp8": "blockwise"}}
MXFP8 = {"trainer": {"megatron": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}}
TENSORWISE = {"trainer": {"megatron": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}}
FP4 = {"trainer": {"megatron": {"fp4": "e2m1"}}}
WEIGHTS = {"rollout": {"quantization": "fp8_per_channel"}}


@pytest.mark.parametrize(
    ("sections", "capability", "field"),
    [
        pytest.param({}, (7, 0), None, id="nothing asked"),
        pytest.param(BLOCKWISE, (8, 9), "trainer.fp8 = blockwise", id="blocks on Ada"),
        pytest.param(BLOCKWISE, (9, 0), None, id="blocks on Hopper"),
        pytest.param(BLOCKWISE, (10, 0), None, id="blocks on Blackwell"),
        pytest.param(TENSORWISE, (8, 6), "trainer.megatron.fp8_recipe = tensorwise", id="tensors on Ampere"),
        pytest.param(TENSORWISE, (8, 9), None, id="tensors on Ada"),
        pytest.param(MXFP8, (9, 0), "trainer.megatron.fp8_recipe = mxfp8", id="MXFP8 on Hopper"),
        pytest.param(MXFP8, (10, 3), None, id="MXFP8 on Blackwell"),
        pytest.param(MXFP8, (12, 0), "trainer.megatron.fp8_recipe = mxfp8", id="MXFP8 on a later one"),
        pytest.param(FP4, (9, 0), "trainer.megatron.fp4 = e2m1", id="FP4 on Hopper"),
        pytest.param(WEIGHTS, (8, 6), "rollout.quantization = fp8_per_channel", id="the engine's weights on Ampere"),
        pytest.param(WEIGHTS, (8, 9), None, id="the engine's weights on Ada"),
        pytest.param(WEIGHTS | {"loop": "sft"}, (8, 6), None, id="no engine"),
        pytest.param(BLOCKWISE, None, None, id="a GPU that does not tell"),
        pytest.param({"trainer": {"megatron": {"fp8": "e4m3", "fp8_recipe": ["x"]}}}, (8, 0), None, id="no recipe"),
    ],
)
def test_generations(sections: dict[str, Any], capability: Capability | None, field: str | None) -> None:
    found = unmet(made(**sections), capability, SOUND)
    assert found == [] if field is None else len(found) == 1 and found[0].startswith(f"{field}: G has compute capa")


@pytest.mark.parametrize(("has_flashinfer", "least"), [(False, (8, 9)), (True, (8, 0))])
def test_a_cache_in_fp8_is_read_by_flashinfer_on_ampere(
    monkeypatch: pytest.MonkeyPatch, has_flashinfer: bool, least: Capability
) -> None:
    monkeypatch.setattr("megarl.platform.gpu_needs.runs_on_cpu", lambda: False)
    found = (lambda name: object()) if has_flashinfer else lambda name: None
    monkeypatch.setattr("megarl.platform.gpu_needs.find_spec", found)
    recipe = made(rollout={"kv_cache_dtype": "fp8_e5m2"})
    assert unmet(recipe, least, None) == []
    below: Capability = (7, 5) if has_flashinfer else (8, 6)
    (text,) = unmet(recipe, below, None)
    assert text.startswith("rollout.kv_cache_dtype = fp8_e5m2: ") and "set rollout.kv_cache_dtype=auto" in text


@pytest.mark.parametrize(
    ("sections", "versions", "told_of"),
    [
        pytest.param(BLOCKWISE, None, [], id="unknown"),
        pytest.param(BLOCKWISE, {"CUDA": "13.0"}, ["Engine is not installed, it needs 2.3.0"], id="not installed"),
        pytest.param(BLOCKWISE, {"Transformer Engine": "2.3.0.dev0+c9", "CUDA": "13.0"}, [], id="development"),
        pytest.param(BLOCKWISE, {"Transformer Engine": "2.3.0", "CUDA": "12.9"}, [], id="the least"),
        pytest.param(BLOCKWISE, {"Transformer Engine": "2.10.0", "CUDA": "12.8"}, ["CUDA 12.8 is"], id="CUDA"),
        pytest.param(
            BLOCKWISE, {"Transformer Engine": "2.2", "CUDA": "12.1"}, ["Engine 2.2 is", "CUDA 12.1 is"], id="both"
        ),
        pytest.param(MXFP8, {"Transformer Engine": "2.0.1", "CUDA": "12.1"}, ["Engine 2.0.1 is"], id="MXFP8"),
        pytest.param(WEIGHTS, {"CUDA": "12.1"}, [], id="the engine asks its own"),
    ],
)
def test_versions(sections: dict[str, Any], versions: dict[str, str] | None, told_of: list[str]) -> None:
    found = unmet(made(**sections), (10, 0), versions)
    assert len(found) == len(told_of) and all(part in text for part, text in zip(told_of, found, strict=True))


def test_versions_are_those_installed() -> None:
    import torch

    found = library_versions()
    assert found.get("CUDA") == torch.version.cuda
    assert ("Transformer Engine" in found) == (find_spec("transformer_engine") is not None)


def test_generations_have_names() -> None:
    shown = [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0)]
    names = ["Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "Blackwell"]
    assert [generation(capability) for capability in shown] == names
