"""Boxes of an optimizer's state, and that nothing is gathered for a checkpoint."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megarl.planner.memory.devices import PINNED_BLOCK_BYTES
from megarl.reshard.boxes import flat_boxes
from megarl.training.host.offload import BLOCK_BYTES, copy_to_pinned_blocks
from megarl.training.model import FrozenModel
from megarl.training.state.checkpoint import restore_optimizer, without_pickles
from tests.rank_pool import RankPool
from tests.training.state.test_checkpoint import build, parallel_of, recipe_of, update


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_boxes_of_every_range_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(values.numel()):
        for stop in range(start + 1, values.numel() + 1):
            boxes = list(flat_boxes(shape, start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
            cut = [values[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] for offset, size in boxes]
            assert torch.cat([part.flatten() for part in cut]).tolist() == list(range(start, stop))


def test_a_rollback_takes_the_step_count_of_the_checkpoint_and_the_rate_of_the_recipe() -> None:
    """Transformer Engine's Adam, like this stand-in, counts its steps in its parameter groups."""
    inner = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    [group] = inner.param_groups
    group["step"] = 10
    saved = deepcopy(inner.state_dict())
    group.update(step=17, lr=0.5)
    restore_optimizer(SimpleNamespace(optimizer=inner, load_state_dict=inner.load_state_dict), saved, {})
    [group] = inner.param_groups
    assert group["step"] == 10 and group["lr"] == 0.5


def test_blocks_are_as_large_as_the_planner_says() -> None:
    """It is used without torch."""
    assert PINNED_BLOCK_BYTES == BLOCK_BYTES


def test_staged_copies_share_blocks_and_are_copies() -> None:
    tensors = [torch.arange(5), torch.arange(3, dtype=torch.bfloat16).view(1, 3), torch.zeros(()), torch.arange(400)]
    copies = copy_to_pinned_blocks(tensors, pin=False, block_bytes=256)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    storages = [copy.untyped_storage()._cdata for copy in copies]
    assert [a == b for a, b in pairwise(storages)] == [True, True, False]
    tensors[0].zero_()
    assert copies[0].tolist() == [0, 1, 2, 3, 4]


def test_copies_to_locked_memory_are_complete_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, waited = torch.empty, Mock()
    # Without a GPU no memory can be locked.
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    copy_to_pinned_blocks([torch.arange(5)], pin=False)
    assert not waited.called
    copy_to_pinned_blocks([torch.arange(5)], pin=True)
    waited.assert_called_once_with()


def test_extra_states_that_are_pickles_are_not_loaded() -> None:
    """Transformer Engine's layers would unpickle what is in such a tensor."""
    weight, pickled = torch.ones(2), torch.frombuffer(bytearray(pickle.dumps({"recipe": "any"})), dtype=torch.uint8)
    state = {"fc1.weight": weight, "fc1._extra_state": pickled, "fc2._extra_state1": io.BytesIO(b"x"), "n": None}
    kept = without_pickles(state)
    assert kept["fc1.weight"] is weight and kept["n"] is None
    assert kept["fc1._extra_state"].numel() == kept["fc2._extra_state1"].numel() == 0


def test_a_frozen_model_waits_in_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pass parameters lie where they lay, and nothing was copied back."""
    frozen = FrozenModel.__new__(FrozenModel)
    chunk = torch.nn.Linear(2, 3)
    frozen.chunks, frozen.device = [chunk], torch.device("cpu")  # type: ignore[assignment, list-item]
    places = [parameter.data_ptr() for parameter in chunk.parameters()]
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    with frozen.on_device(), torch.no_grad():
        assert not {parameter.data_ptr() for parameter in chunk.parameters()} & set(places)
        chunk.weight.fill_(7)
    assert [parameter.data_ptr() for parameter in chunk.parameters()] == places and not (chunk.weight == 7).any()
    with frozen.on_device(is_changed=True), torch.no_grad():
        chunk.weight.fill_(7)
    assert [parameter.data_ptr() for parameter in chunk.parameters()] == places and (chunk.weight == 7).all()


def written_elements(recipe: Any, folder: Path) -> tuple[int, int, list[str]]:
    """Elements of the optimizer's state on this rank and in what it would write, and the collectives on the way."""
    from megarl.training.state import checkpoint

    parallel = parallel_of((1, 1, 2))
    engine = build(recipe, parallel)
    update(engine, parallel, 0)
    held = sum(tensor.numel() for tensor in engine._optimizer_state())
    gathers: list[str] = []
    patched = ("all_gather", "gather", "all_gather_into_tensor", "_all_gather_base")
    original = {name: getattr(torch.distributed, name) for name in patched}
    for name, function in original.items():

        def noted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            gathers.append(_name)
            return _function(*args, **kwargs)

        setattr(torch.distributed, name, noted)
    try:
        state = checkpoint._shard_model(engine, is_loading=False)
    finally:
        for name, function in original.items():
            setattr(torch.distributed, name, function)
    boxes = [box for boxes in state["optimizer"]["param_state"].values() for box in boxes.values()]
    own = {tensor.untyped_storage()._cdata for tensor in engine._optimizer_state()}
    assert all(box.data.untyped_storage()._cdata in own for box in boxes), "a copy"
    return held, sum(box.data.numel() for box in boxes), gathers


def test_nothing_is_gathered_for_a_save(ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    recipe = recipe_of(tiny_model(num_layers=2), dtype="bfloat16")
    for held, written, gathers in ranks.run(written_elements, recipe, tmp_path, world_size=2):
        assert written == held > 0 and gathers == []
