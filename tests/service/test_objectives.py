"""Losses from the wire, with their gradients, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megarl.service.messages.datums import make_batch
from megarl.service.messages.losses import LOSSES, read_settings
from megarl.service.messages.wire import Datum
from megarl.service.ranks.objectives import make_objective
from megarl.service.refusals import UserError
from megarl.training import objective
from megarl.training.rows.packed_rows import pack_row

VOCABULARY = 50


def datums(loss: str) -> list[Datum]:
    random = np.random.default_rng(3)
    made = []
    for length in (6, 11, 3):
        inputs: dict[str, Any] = {
            "target_tokens": random.integers(0, VOCABULARY, length),
            "weights": random.choice([0.0, 1.0, 0.5], length).astype(np.float32),
            "logprobs": random.normal(-2, 0.4, length).astype(np.float32),
            "advantages": random.normal(0, 1, length).astype(np.float32),
            "sequence_ratio_mask": (np.arange(length) > 1).astype(np.float32),
        }
        if loss == "gspo":
            inputs["advantages"][:2] = 0
        wanted = ("target_tokens", *LOSSES[loss].inputs)
        made.append(Datum(random.integers(0, VOCABULARY, length), {name: inputs[name] for name in wanted}))
    return made


def reference(loss: str, inputs: dict[str, Any], logprobs: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The sum over one datum's tokens, as in section 5 of the vendor's documentation."""
    values = {name: torch.from_numpy(np.asarray(value, np.float64)) for name, value in inputs.items()}
    if loss == "cross_entropy":
        return -(values["weights"] * logprobs).sum()
    past, advantages = values["logprobs"], values["advantages"]
    ratio = (logprobs - past).exp()
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if loss == "cispo":
        return -(ratio.detach().clamp(low, high) * advantages * logprobs).sum()
    if loss == "dro":
        return (-advantages * logprobs + 0.3 / 2 * (logprobs - past).square()).sum()
    mask = values["sequence_ratio_mask"]
    mean = ((logprobs - past).detach() * mask).sum() / mask.sum()
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return -(mask * torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)).sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No ranks here: a row is whole.
    monkeypatch.setattr(objective, "whole_row", lambda tensor, row: tensor)
    settings: dict[str, float] = {}
    low, high = 0.8, 1.2
    if "clip_low_threshold" in LOSSES[loss].settings:
        settings, (low, high) = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}, (0.7, 1.4)
    if loss == "dro":
        settings = {"beta": 0.3}
    sent = datums(loss)
    batch = make_batch(sent, loss, vocab_size=VOCABULARY, max_tokens=64)
    row = pack_row(batch, multiple=4, qkv_format="thd", device=torch.device("cpu"))
    logits = torch.randn(len(row.mask), VOCABULARY, generator=torch.Generator().manual_seed(5)) * 0.3
    logits = (logits + torch.nn.functional.one_hot(row.labels[0], VOCABULARY) * 2).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(1, row.labels[0][:, None])[:, 0]
    total, _, (measured, _) = make_objective(loss, read_settings(loss, settings))(
        torch.stack([logprobs, torch.zeros_like(logprobs)]), row
    )
    [gradient] = torch.autograd.grad(total, logits)
    exact = logits.detach().double().requires_grad_()
    starts = row.padded_lengths.cumsum() - row.padded_lengths
    sums = []
    for start, datum in zip(starts, sent, strict=True):
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        own = exact[start : start + len(targets)].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        sums.append(reference(loss, dict(datum.inputs), own, low, high))
    expected = torch.stack(sums).sum()
    [expected_gradient] = torch.autograd.grad(expected, exact)
    assert abs(total.item() - expected.item()) <= 1e-6 * max(1.0, abs(expected.item()))
    assert abs(measured[1].double().sum().item() - expected.item()) <= 1e-6 * max(1.0, abs(expected.item()))
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


def drop(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {key: value for key, value in inputs.items() if key != name}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop("weights"), "loss_fn_inputs.weights is missing"),
        (lambda inputs: inputs | {"advantages": inputs["weights"]}, "loss_fn_inputs.advantages"),
        (lambda inputs: inputs | {"weights": inputs["weights"][:-1]}, "10 values"),
        (lambda inputs: inputs | {"weights": inputs["weights"] * np.float32("nan")}, "not finite"),
        (lambda inputs: inputs | {"target_tokens": inputs["target_tokens"] + VOCABULARY}, "0 to 49"),
        (lambda inputs: inputs | {"target_tokens": inputs["target_tokens"] - VOCABULARY}, "0 to 49"),
        (lambda inputs: inputs | {"target_tokens": inputs["weights"]}, "int64"),
    ],
)
def test_a_datum_that_cannot_be_trained_is_named(change: Any, text: str) -> None:
    sent = datums("cross_entropy")
    sent[1] = Datum(sent[1].token_ids, change(dict(sent[1].inputs)))
    with pytest.raises(UserError, match=r"data\[1\]") as refused:
        make_batch(sent, "cross_entropy", vocab_size=VOCABULARY, max_tokens=64)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("loss", "settings", "text"),
    [
        ("stable_reinforce", {}, "importance_sampling or cispo"),
        ("ppo", {"clip_low": 0.1}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.1}, "0 <= low <= 1 <= high"),
        ("ppo", {"clip_high_threshold": "wide"}, "not a finite number"),
        ("cispo", {"clip_high_threshold": float("nan")}, "not a finite number"),
        ("cross_entropy", {"beta": 1.0}, "it has none"),
        ("dro", {}, "beta is missing"),
        ("dro", {"beta": -1.0}, "above 0"),
    ],
)
def test_settings_of_a_loss_are_used_or_refused(loss: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(loss, settings)
    assert text in str(refused.value)
