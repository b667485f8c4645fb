"""Drafters that an engine cannot have are refused: they fail in the ranks, or draft at random."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from megarl.config import Recipe
from megarl.preflight import check
from megarl.preflight.vllm_limits import HOST_DRAFTERS, _drafter
from megarl.types import ConfigError
from tests.shapes import small_shape


@pytest.fixture
def faults(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The faults of a recipe with a drafter, on GPUs unless said otherwise."""

    def found(
        config: dict[str, Any], *, is_cpu: bool = False, evaluation: Any = None, trainer: Any = None, **rollout: Any
    ) -> list[str]:
        monkeypatch.setattr("megarl.preflight.vllm_limits.runs_on_cpu", lambda: is_cpu)
        monkeypatch.setattr("megarl.preflight.vllm_limits.supported_head_sizes", lambda: [])
        try:
            vllm = {"speculative_config": config}
            sections = {"evaluation": evaluation or {}, "trainer": trainer or {}}
            check(recipe(rollout={**rollout, "vllm": vllm}, **sections), is_start=False)
        except ConfigError as error:
            return [line.strip() for line in str(error).split("\n")[1:]]
        return []

    return found


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "config",
    [
        {"model": "/models/drafter", "num_speculative_tokens": 3},
        {"method": "eagle3", "model": "/models/eagle", "num_speculative_tokens": 3},
        {"model": "Drafter", "num_speculative_tokens": 3},
        {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3},
    ],
)
def test_weights_that_nobody_writes_are_refused(faults: Callable[..., list[str]], config: dict[str, Any]) -> None:
    (text,) = faults(config)
    assert text.startswith("rollout.vllm.speculative_config = ") and "own weights would stay random" in text
    assert "set the method to ngram, suffix, custom_class or ngram_gpu, or leave it out" in text
    assert ("an eagle3 drafter's own weights" in text) == (config.get("method") == "eagle3")


@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        {"model": "[ngram]"},
        NGRAM | {"method": "ngram_gpu"},
        {"model": "my_drafters.Own", "num_speculative_tokens": 3},
    ],
)
def test_drafters_without_weights_are_allowed(faults: Callable[..., list[str]], config: dict[str, Any]) -> None:
    assert faults(config) == []


def test_a_drafter_on_the_gpu_is_refused_without_one(faults: Callable[..., list[str]]) -> None:
    (text,) = faults(NGRAM | {"method": "ngram_gpu"}, is_cpu=True)
    assert text.startswith("rollout.vllm.speculative_config = ") and "take ngram" in text
    assert faults(NGRAM, is_cpu=True) == []


def test_drafts_are_refused_with_recorded_experts(faults: Callable[..., list[str]]) -> None:
    texts = faults(NGRAM, trainer={"router_replay": True})
    assert any("with trainer.router_replay the engine records" in text for text in texts)


def test_models_with_states_may_draft(recipe: Callable[..., Recipe]) -> None:
    made = recipe(rollout={"vllm": {"speculative_config": NGRAM}})
    for family in ("qwen3", "qwen3_next", "qwen3_5_text"):
        assert list(_drafter(made, small_shape(family))) == []


@pytest.mark.parametrize(
    ("method", "is_told"), [("ngram", True), ("suffix", True), ("custom_class", True), ("ngram_gpu", False)]
)
def test_no_step_is_begun_ahead_of_a_drafter_on_the_host(
    faults: Callable[..., list[str]], method: str, is_told: bool
) -> None:
    told = [text for text in faults(NGRAM | {"method": method}, async_scheduling=True) if "arctic" not in text]
    assert len(told) == is_told
    assert not is_told or told[0].startswith(
        f"rollout.async_scheduling = True: the draft method {method} runs on the host"
    )
    assert [text for text in faults(NGRAM | {"method": method}) if "async" in text] == []


def test_an_own_drafter_is_known_by_its_import_path_as_vllm_knows_it(faults: Callable[..., list[str]]) -> None:
    (text,) = faults({"model": "my_drafters.Own", "num_speculative_tokens": 3}, async_scheduling=True)
    assert text.startswith("rollout.async_scheduling = True") and "custom_class" in text


@pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="its library is installed")
def test_a_drafter_whose_library_is_missing_is_named(faults: Callable[..., list[str]]) -> None:
    (text,) = faults(NGRAM | {"method": "suffix"})
    assert "vLLM's method suffix needs the package arctic-inference, which is not installed; use ngram" in text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sampling": {"max_new_tokens": 24, "top_p": 0.7}}, "rollout.sampling.top_p, top_k or min_p kept"),
        ({"sampling": {"max_new_tokens": 24, "min_p": 0.1}}, "rollout.sampling.top_p, top_k or min_p kept"),
        ({"evaluation": {"sampling": {"min_p": 0.1}}}, "leave out this field or evaluation.sampling.min_p"),
    ],
)
def test_what_is_not_known_of_drafts_is_not_sampled_with_them(
    faults: Callable[..., list[str]], changed: dict[str, Any], told: str
) -> None:
    (text,) = faults(NGRAM, **changed)
    assert text.startswith("rollout.vllm.speculative_config = {'method': 'ngram'") and told in text


def test_the_drafters_on_the_host_are_vllms() -> None:
    """They are the drafters that vLLM's check of async scheduling leaves out, without two that have weights."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = ast.parse((Path(spec.origin).parent / "config/speculative.py").read_text(encoding="utf-8"))
    literals = [n for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.value).startswith("Literal[")]
    types: dict[str, Any] = {"Literal": Literal}
    for node in literals:
        types[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), types)
    ahead = {*get_args(types["EagleModelTypes"]), *get_args(types["NgramGPUTypes"]), "draft_model", "dspark"}
    assert set(get_args(types["SpeculativeMethod"])) - ahead == {*HOST_DRAFTERS, "medusa", "mlp_speculator"}
