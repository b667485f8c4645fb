"""Sampling parameters over the steps, and those of evaluation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.config import Recipe
from megarl.config.sections.sampling import EvaluationSamplingConfig, SamplingConfig


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({}, [1.5] * 5, id="constant"),
        pytest.param({"temperature_schedule": "linear"}, [1.5, 1.25, 1.0, 0.75, 0.5], id="linear"),
        pytest.param({"temperature_schedule": "linear", "temperature_steps": 3}, [1.5, 1.0, 0.5, 0.5, 0.5], id="held"),
        pytest.param({"temperature_schedule": "linear", "temperature_steps": 1}, [1.5] + [0.5] * 4, id="one step"),
        pytest.param({"temperature_schedule": "cosine"}, [1.5, 1.353553, 1.0, 0.646447, 0.5], id="cosine"),
    ],
)
def test_the_temperature_goes_from_its_start_to_its_end(settings: dict[str, Any], expected: list[float]) -> None:
    sampling = SamplingConfig.model_validate({"temperature": 1.5, "end_temperature": 0.5} | settings)
    found = [sampling.temperature_at(step, num_steps=5) for step in range(1, 6)]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("field", ["temperature", "end_temperature"])
def test_temperatures_that_the_engine_refuses(field: str) -> None:
    assert SamplingConfig.model_validate({field: 2.0})
    with pytest.raises(ValidationError, match=rf"{field}\n.*less than or equal to 2"):
        SamplingConfig.model_validate({field: 2.5})
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        EvaluationSamplingConfig.model_validate({"temperature": 2.5})


def test_the_bounds_are_the_engine_s() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "sampling_params.py").read_text(encoding="utf-8")
    assert "if self.temperature > 2.0:" in source and "_MAX_TEMP = 1e-2" in source


def test_evaluation_has_its_own_temperature_and_training_s_stops() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {
                "sampling": {"temperature": 1.5, "temperature_schedule": "linear", "stop": ["a"], "stop_token_ids": [7]}
            },
            "evaluation": {"sampling": {"temperature": 0.5, "stop": ["b"], "min_p": 0.1, "repetition_penalty": 1.2}},
        }
    )  # fmt: skip
    found = recipe.evaluation_sampling
    assert (found.temperature, found.stop, found.stop_token_ids, found.min_p) == (0.5, ("b",), (7,), 0.1)
    assert found.model_dump().keys() == SamplingConfig.model_fields.keys()


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_what_cuts_tokens_off(cut: dict[str, Any]) -> None:
    assert SamplingConfig.model_validate(cut).is_truncated is bool(cut)


@pytest.mark.parametrize(("samples_per_prompt", "temperature", "ks"), [(1, 0.0, ()), (4, 1.5, (4,))])
def test_several_attempts_of_an_evaluation_are_sampled_as_in_training(
    samples_per_prompt: int, temperature: float, ks: tuple[int, ...]
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {"sampling": {"temperature": 1.5}},
            "evaluation": {"samples_per_prompt": samples_per_prompt},
        }
    )  # fmt: skip
    assert (recipe.evaluation_sampling.temperature, recipe.evaluation.ks) == (temperature, ks)
