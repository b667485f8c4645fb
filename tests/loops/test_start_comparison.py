"""The comparison of the trainer with transformers at the start of SFT and preference learning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.loops.start_comparison import Gap, first_sequences, gap_warning, measure_gap
from megarl.training.transformers_logprobs import transformers_logprobs
from megarl.types import TrainingSequence

TOKENS = [np.arange(1, 40), np.arange(20, 60)]


def sequence(num_tokens: int) -> TrainingSequence:
    return TrainingSequence(np.arange(num_tokens), np.ones(num_tokens, bool))


def test_the_first_examples_are_cut_and_stay_whole_pairs() -> None:
    pairs = [(sequence(300), sequence(5)), (sequence(100), sequence(60)), (sequence(9), sequence(9))]
    assert [len(one.token_ids) for one in first_sequences(pairs)] == [128, 5, 100, 60]
    assert len(first_sequences(pairs[:1])) == 2


@pytest.mark.parametrize("mean", [0.06, float("nan")])
def test_more_than_rounding_is_told_with_numbers(mean: float) -> None:
    text = gap_warning(Gap(mean, 1.5, 250), 0.05)
    assert text is not None and text.startswith("model.path: ") and "log-probs of 250 tokens" in text
    assert gap_warning(Gap(0.05, 1.5, 250), 0.05) is None


def test_the_distance_leaves_out_first_tokens() -> None:
    trained = [np.array([9.0, -1.0, -2.0]), np.array([7.0, -3.0])]
    assert measure_gap(trained, [np.zeros(3), np.array([0.0, -3.5])]) == Gap(pytest.approx(3.5 / 3), 2.0, 3)


def test_another_model_of_the_same_weights_differs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """An override is part of the model. With another rotary base the log-probs differ by more than rounding."""
    folder = str(tiny_model(initializer_range=0.15))
    own = transformers_logprobs(folder, {}, TOKENS, torch.float32)
    other = transformers_logprobs(folder, {"rope_theta": 50.0}, TOKENS, torch.float32)
    assert isinstance(own, list) and isinstance(other, list)
    assert [len(one) for one in own] == [39, 40] and own[0][0] == 0 and own[0][1:].max() < 0
    assert gap_warning(measure_gap(own, other), 1e-3) is not None
    assert gap_warning(measure_gap(own, own), 1e-3) is None


def test_a_model_that_transformers_or_memory_cannot_hold_is_a_reason(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    reason = transformers_logprobs(str(folder), {}, TOKENS, torch.float32)
    assert isinstance(reason, str) and reason.startswith("transformers cannot compute this model (")
    monkeypatch.setattr("megarl.training.transformers_logprobs._LARGEST_BYTES", 1000)
    reason = transformers_logprobs(str(tiny_model()), {}, TOKENS, torch.float32)
    assert isinstance(reason, str) and "GiB of host memory" in reason
