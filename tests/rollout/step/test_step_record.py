"""Records of steps: read back as written, and the first difference of two executions is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from megarl.reshard.checks.fingerprint import fingerprint
from megarl.rollout.state import flatten
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.step_record import StepRecord, batch_arrays, compute_digests, find_differences, record_folder
from megarl.types import DataError
from tests.rollout.batches import segmented

LAYOUT = {"tp": 1, "pp": 1, "dp": 2}
OTHER_LAYOUT = {"tp": 2, "pp": 1, "dp": 1}


def record_of(step: int = 3, *, is_complete: bool = True, seed: int = 0) -> StepRecord:
    groups = [[segmented(0, 0, 1.0, ".xx"), segmented(0, 1, 0.0, ".xxx")], [segmented(1, 0, 0.5, ".x", ".xx")]]
    batch = RLBatch.from_groups(groups)
    random = np.random.default_rng(seed)
    for name in ("advantages", "old_logprobs"):
        batch.per_token[name] = random.standard_normal(len(batch.token_ids)).astype(np.float32)
    arrays = batch_arrays(batch)
    weights = torch.from_numpy(random.standard_normal((4, 6)))
    parts = {0: fingerprint(weights[:2]), 1: fingerprint(weights[2:], (2, 0))}
    return StepRecord(
        step=step,
        recipe="name: test\n",
        layout=LAYOUT,
        kl_coefficient=0.1,
        role_baselines={"first": 0.1 + 0.2},
        groups=groups,
        waiting=[[segmented(2, 0, 0.0, ".xx")]],
        arrays=arrays if is_complete else {},
        digests=compute_digests({"token_ids": batch.token_ids, **arrays}, batch.cu_samples),
        borders=batch.cu_samples,
        metrics={"train/loss": 0.25, "train/grad_norm": 1.5},
        state={"optimizer.state.exp_avg.layer[0]": parts, "layer[0]": parts},
    )


def loaded(record: StepRecord, records: Path) -> StepRecord:
    everything = flatten([*record.groups, *record.waiting])
    problems = {(t.problem.source, t.problem.index): t.problem for t in everything}
    return StepRecord.load(records, record.step, lambda source, index: problems[source, index])


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_record_is_read_as_it_was_written(tmp_path: Path, is_complete: bool) -> None:
    record = record_of(is_complete=is_complete)
    num_bytes = record.save(tmp_path)
    assert num_bytes == sum(file.stat().st_size for file in record_folder(tmp_path, 3).iterdir())
    found = loaded(record, tmp_path)
    assert list(find_differences(record, found)) == []
    assert (found.layout, found.metrics, found.state, found.kl_coefficient) == (
        LAYOUT,
        record.metrics,
        record.state,
        0.1,
    )
    assert found.role_baselines == {"first": 0.1 + 0.2}
    assert (found.arrays.keys() == record.arrays.keys()) and found.num_tokens == record.num_tokens
    everything = (flatten([*one.groups, *one.waiting]) for one in (record, found))
    assert [len(group) for group in found.waiting] == [1]
    for one, other in zip(*everything, strict=True):
        assert (one.group, one.number, one.reward) == (other.group, other.number, other.reward)
        for mine, its in zip(one.segments, other.segments, strict=True):
            np.testing.assert_array_equal(mine.token_ids, its.token_ids)
            np.testing.assert_array_equal(mine.rollout_logprobs, its.rollout_logprobs)
    assert list(find_differences(StepRecord.load(tmp_path, 3), found)) == []


def test_a_later_record_of_a_step_replaces_the_earlier_one(tmp_path: Path) -> None:
    record_of(seed=0).save(tmp_path)
    second = record_of(seed=1)
    second.save(tmp_path)
    assert list(find_differences(second, loaded(second, tmp_path))) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_differences_come_in_the_order_of_the_step() -> None:
    first = record_of()
    weights = torch.ones(4, 6, dtype=torch.float64)
    other = replace(
        first,
        arrays={name: array.copy() for name, array in first.arrays.items()},
        metrics={**first.metrics, "train/grad_norm": 1.6},
        state={
            **first.state,
            "layer[0]": {**first.state["layer[0]"], 1: fingerprint(weights[2:], (2, 0))},
            "optimizer.state.exp_avg.layer[0]": {0: fingerprint(weights[:2]), 1: first.state["layer[0]"][1]},
        },
    )
    other.arrays["advantages"][4] += 0.5
    found = list(find_differences(first, other))
    assert [one.tensor for one in found] == [
        "advantages", "optimizer.state.exp_avg.layer[0]", "train/grad_norm", "layer[0]",
    ]  # fmt: skip
    # Sample 0 has three tokens, so token 4 of the batch is the second of sample 1.
    assert found[0].place == "of sample 1, token 1" and found[0].samples.tolist() == [1]
    assert "1 of 3 samples differ" in str(found[0])
    assert [found[1].place, found[3].place] == ["on rank 0", "on rank 1"]


def test_without_values_the_sample_is_named_by_its_checksum() -> None:
    first = record_of(is_complete=False)
    digests = {name: array.copy() for name, array in first.digests.items()}
    digests["old_logprobs"][2] ^= 1
    [found] = find_differences(first, replace(first, digests=digests))
    assert (found.tensor, found.place) == ("old_logprobs", "of sample 2")
    digests["token_ids"][0] ^= 1
    # Tokens are equal or not, also in another layout; values cannot be compared without being there.
    elsewhere = replace(first, digests=digests, layout=OTHER_LAYOUT)
    assert [one.tensor for one in find_differences(first, elsewhere)] == ["token_ids"]


@pytest.mark.parametrize(("change", "differs"), [(3e-6, False), (1e-3, True), (float("nan"), True)])
def test_another_layout_has_a_tolerance(change: float, differs: bool) -> None:
    first = record_of()
    weights = torch.from_numpy(np.random.default_rng(5).standard_normal((4, 6)))
    state = {"layer[0]": {0: fingerprint(weights)}}
    halves = weights * (1 + change)
    other = {"layer[0]": {0: fingerprint(halves[:, :3]), 1: fingerprint(halves[:, 3:], (0, 3))}}
    arrays = {**first.arrays, "advantages": first.arrays["advantages"] * np.float32(1 + change)}
    elsewhere = replace(first, arrays=arrays, state=other, layout=OTHER_LAYOUT)
    found = list(find_differences(replace(first, state=state), elsewhere))
    assert [one.tensor for one in found] == (["advantages", "layer[0]"] if differs else [])


def test_nan_agrees_with_nan_alone() -> None:
    first = record_of()
    arrays = {name: array.copy() for name, array in first.arrays.items()}
    arrays["old_logprobs"][0] = np.nan
    unknown = replace(first, arrays=arrays)
    assert list(find_differences(unknown, unknown)) == []
    assert [one.tensor for one in find_differences(first, unknown)] == ["old_logprobs"]


def test_of_wrong_gradients_the_most_different_one_comes_first() -> None:
    first = record_of()
    parts = [{0: fingerprint(torch.full((4, 6), value))} for value in (1.0, 1.001, 2.0)]
    names = [f"optimizer.state.exp_avg.layer[{layer}]" for layer in (2, 10)]
    before = replace(first, state=dict.fromkeys(names, parts[0]))
    after = replace(first, state=dict(zip(names, parts[1:], strict=True)))
    assert [one.tensor for one in find_differences(before, after)] == names[::-1]


def test_what_only_one_execution_has_is_a_difference() -> None:
    first = record_of()
    other = replace(
        first,
        arrays={name: array for name, array in first.arrays.items() if name != "advantages"},
        digests={name: array for name, array in first.digests.items() if name != "advantages"},
        metrics={"train/loss": 0.25},
        state={},
    )
    for one, two in ((first, other), (other, first)):
        found = [each.tensor for each in find_differences(one, two)]
        assert found == ["advantages", "train/grad_norm", "layer[0]"]
    # A record of train.record = tokens has neither values nor the optimizer's state.
    small = replace(first, arrays={}, state={"layer[0]": first.state["layer[0]"]})
    assert not list(find_differences(first, small)) and not list(find_differences(small, first))


def test_a_chain_differs_from_the_first_different_step_on(tmp_path: Path) -> None:
    chains = []
    for name, changed in (("one", 0), ("other", 3)):
        for step in range(1, 5):
            record_of(step, seed=int(step == changed)).save(tmp_path / name)
        chains.append([StepRecord.load(tmp_path / name, step).chain for step in range(1, 5)])
    assert [one == other for one, other in zip(*chains, strict=True)] == [True, True, False, False]
    assert len(set(chains[0])) == 4


@pytest.mark.parametrize("damage", ["missing", "cut", "field", "deep", "list", "tensors", "borders", "other step"])
def test_a_damaged_record_is_refused_with_its_file(tmp_path: Path, damage: str) -> None:
    record = record_of()
    record.save(tmp_path)
    file = record_folder(tmp_path, 3) / "record.json"
    text = file.read_text()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_text(text[:-20])
    elif damage == "deep":
        file.write_text("[" * 100_000)
    elif damage == "tensors":
        tensors = file.with_name("record.safetensors")
        tensors.write_bytes(tensors.read_bytes()[:-30])
    elif damage == "borders":
        tensors = file.with_name("record.safetensors")
        tensors.write_bytes(save({**load_file(tensors), "borders": np.array([0, 2])}))
    else:
        values = json.loads(text)
        changes = {"field": {"sizes": None}, "list": {"state": []}, "other step": {"step": 4}}
        file.write_text(json.dumps(values | changes[damage]))
    with pytest.raises(DataError, match="step_000003"):
        loaded(record, tmp_path)
