"""The arena of a rank: which calls lock which bytes, in whose turn, and what is refused."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from megarl.models.policy import PackedModel
from megarl.platform.memory import page_lock
from megarl.training.host.host_arena import ALIGNMENT, HostArena, aligned_bytes
from megarl.training.host.offload import Offloadable
from megarl.training.model import FrozenModel
from megarl.types import ConfigError
from megarl.worker import trainer_worker

PAGE = 4096
SIZES = [3 * PAGE + 40, 8, 0, 5 * PAGE, 4, 2 * PAGE + 1]


@pytest.fixture(autouse=True)
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the machine's turns, here of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"megarl-page-lock-{os.getuid()}"


def wait_until_locked(arena: HostArena, num_calls: int) -> None:
    end = time.monotonic() + 20
    while arena.num_calls < num_calls and time.monotonic() < end:
        time.sleep(1e-3)


def test_all_copies_are_locked_in_the_background_by_few_calls() -> None:
    arena = HostArena(sum(map(aligned_bytes, SIZES)), chunk_bytes=4 * PAGE)
    wait_until_locked(arena, 3)
    copies = arena.take_copies(SIZES)
    for copy in copies:
        arena.wait_for(copy)
    # 10 pages and some bytes are 11 pages.
    assert (arena.num_calls, arena.num_locked_bytes) == (3, 11 * PAGE)
    assert [copy.memory.nbytes for copy in copies] == SIZES
    starts = [copy.memory.data_ptr() for copy in copies if copy.memory.nbytes]
    assert all(start % ALIGNMENT == 0 for start in starts)
    for number, copy in enumerate(copies):
        copy.memory.fill_(number + 1)
    assert [copy.memory.unique().tolist() for copy in copies] == [[1], [2], [], [4], [5], [6]]
    arena.close()


def test_a_copy_waits_for_its_own_chunks_only() -> None:
    arena = HostArena(0, chunk_bytes=4 * PAGE)
    copies = arena.take_copies(SIZES)
    arena.wait_for(copies[1])
    assert arena.num_calls == 1, "bytes 12,352 to 12,360 lie in the first chunk"
    arena.wait_for(copies[3])
    assert arena.num_calls == 3, "five pages from page 3 on lie in all three"
    arena.wait_for(copies[0])
    assert arena.num_calls == 3


def test_an_arena_that_is_too_small_grows_once() -> None:
    arena = HostArena(2 * PAGE)
    wait_until_locked(arena, 1)
    for copy in arena.take_copies([PAGE, PAGE // 2, PAGE, PAGE]):
        arena.wait_for(copy)
    assert (arena.num_calls, arena.num_locked_bytes) == (2, 4 * PAGE)


def test_another_process_of_the_machine_is_waited_for(turns: Path) -> None:
    """Its turn ends with the process, also when it is killed."""
    code = (
        f"import fcntl, time; file = open({str(turns)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
    )
    with subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        arena = HostArena(PAGE)
        time.sleep(0.1)
        assert arena.num_calls == 0
        holder.kill()
    wait_until_locked(arena, 1)
    assert arena.num_calls == 1
    with turns.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("kind", ["suspended holder", "no folder", "link"])
def test_without_a_turn_memory_is_locked_all_the_same(
    turns: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(page_lock, "_LONGEST_WAIT_SECONDS", 0.05)
    if kind == "link":
        turns.symlink_to(tmp_path / "other")
    if kind == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with (tmp_path / "held").open("w") as file:
        if kind == "suspended holder":
            fcntl.flock(file, fcntl.LOCK_EX)
            (tmp_path / "held").rename(turns)
        arena = HostArena(PAGE)
        wait_until_locked(arena, 1)
    assert arena.num_calls == 1 and not (tmp_path / "other").exists()


def test_more_memory_than_the_machine_has_is_refused_before_any_is_locked() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.offload: .* 1073741824\.0 GiB"):
        HostArena(1 << 60)


def test_a_refused_lock_names_limit_and_remedy() -> None:
    text = page_lock.lock_error_text(3 << 20, "out of memory")
    assert "3 MiB" in text and "out of memory" in text and "ulimit -l" in text and "trainer.offload" in text


def test_replaced_tensors_use_the_memory_of_the_former_ones() -> None:
    """A loaded checkpoint replaces moments. Fewer tensors leave memory for a later release."""
    tensors = [torch.full((300,), 1.0), torch.full((7,), 2.0), torch.full((300,), 3.0)]
    arena = HostArena(0)
    lent = Offloadable(lambda: tensors, arena)
    for count in (3, 2, 3):
        tensors = [torch.arange(float(len(tensor))) + len(tensor) for tensor in reversed(tensors)][:count]
        tensors += [torch.full((300,), 4.0)] * (count - len(tensors))
        expected = [tensor.clone() for tensor in tensors]
        lent.offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        lent.onload()
        assert all(map(torch.equal, tensors, expected))
    assert arena.num_calls == 1


def test_device_memory_is_released_once_its_copies_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(5)
    num_bytes: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: num_bytes.append(tensor.untyped_storage().nbytes()))
    lent = Offloadable(lambda: [tensor], HostArena(0))
    lent.offload()
    assert num_bytes == [20] and tensor.untyped_storage().nbytes() == 0
    # Nothing is left to release, and the copies stay.
    lent.offload()
    lent.onload()
    assert num_bytes == [20] and tensor.tolist() == [1.0] * 5


def test_values_that_are_not_needed_come_back_as_zeros() -> None:
    tensor = torch.ones(5)
    lent = Offloadable(lambda: [tensor, tensor[2:]])
    lent.offload()
    assert tensor.untyped_storage().nbytes() == 0
    lent.onload()
    assert tensor.tolist() == [0.0] * 5


def test_a_closed_arena_ends_its_thread() -> None:
    arena = HostArena(64 * PAGE, chunk_bytes=PAGE)
    arena.close()
    calls = arena.num_calls
    time.sleep(0.05)
    assert arena.num_calls == calls


def test_a_model_that_only_scores_waits_for_its_memory_to_be_locked() -> None:
    model, chunk = object.__new__(FrozenModel), torch.nn.Linear(8, 8)
    model.chunks, model.arena = [cast(PackedModel, chunk)], HostArena(0)
    weight = chunk.weight.detach().clone()
    model._move_to_host()
    assert (model.arena.num_calls, model.arena.num_locked_bytes) == (1, PAGE)
    assert torch.equal(chunk.weight, weight)


def test_a_trainer_s_end_unlocks_its_memory_while_its_world_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, left = Mock(), Mock()
    part = Mock()
    worker.state.parts = {"policy": part}
    monkeypatch.setattr(trainer_worker.world, "leave", left)
    left.side_effect = worker.arena.close.assert_called_once_with
    trainer_worker.TrainerWorker.close(worker)
    part.close.assert_called_once_with()
    left.assert_called_once_with()
