"""Random bit flips in weights of trainer, engine, checkpoint and export are named, by tensor and rank or by file.

A trainer (tp 2, dp 2) shares four ranks with engines (tp 2). Each flip changes one bit of a weight after the checksums
of a version were taken. The comparison before the next use must name exactly this rank and a box with the element. A
flip in a file of a checkpoint must be named by its manifest. A flip in the weights of an exported folder must be named
by file and tensor.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import check_hashes, check_sizes, file_record, write_manifest
from megarl.checkpoint.safetensors import check_folder
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.files.model_folder import SINGLE
from megarl.types import DataError
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(900)]

LAYOUT = ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2)
NEW_TOKENS = 16
LARGEST_SHARE = 0.01
"""Largest share of a step's processor time that the comparisons may take, for a model of width 512."""
PLACES = ("trainer", "engine", "checkpoint", "export")


@pytest.mark.parametrize(
    ("num_flips", "hidden_size", "num_tokens"), [(6, 256, 64), (100, 512, 2048)], ids=["6 flips", "100 flips"]
)
def test_each_flip_is_named(
    tiny_model: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
    num_flips: int,
    hidden_size: int,
    num_tokens: int,
) -> None:
    draw = random.Random(0)
    # Rank, and numbers from which the rank draws tensor, element and bit.
    flips = [
        (PLACES[index % len(PLACES)], draw.randrange(LAYOUT.world_size), draw.random(), draw.random())
        for index in range(num_flips)
    ]
    sizes = dict(hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_layers=2, num_heads=8, num_kv_heads=4)
    saved, exported = tmp_path / "checkpoint", tmp_path / "hf"
    saved.mkdir()
    recipe = recipe_of(tiny_model(**sizes), num_tokens)
    results = ranks.run(flip_weights, recipe, flips, str(saved), str(exported), num_tokens, world_size=4)
    outcomes = results[0]["outcomes"]
    files = {path.name: file_record(path) for path in saved.iterdir()}
    write_manifest(saved, files, {"format": "torch_dist"})
    for place, _, *numbers in flips:
        if place == "checkpoint":
            outcomes.append((place, flip_file(saved, numbers)))
        if place == "export":
            outcomes.append((place, flip_export(exported, numbers)))
    assert len(outcomes) == num_flips and {place for place, _ in outcomes} == set(PLACES)
    assert [place for place, is_named in outcomes if not is_named] == []
    # Processor time of all ranks: unlike wall time, it hardly depends on other programs.
    seconds = {name: sum(result[name] for result in results) for name in ("checks", "step")}
    if hidden_size == 512:
        assert seconds["checks"] <= LARGEST_SHARE * seconds["step"]


def recipe_of(model: Path, num_tokens: int) -> Recipe:
    """Return the recipe of the trainer and the engines."""
    return Recipe.model_validate(
        {
            "name": "flips", "loop": "sft", "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"train": "unused", "validation": {"unused": "unused"}, "max_prompt_tokens": 32},
            "cluster": {"ranks_per_node": LAYOUT.world_size},
            "trainer": {"tp": LAYOUT.tp, "max_tokens_per_microbatch": num_tokens},
            "optimizer": {"learning_rate": 1e-3},
            "rollout": {"tp": LAYOUT.rollout_tp, "kv_cache_gib": 0.05, "sampling": {"max_new_tokens": NEW_TOKENS}},
            "weights": {"check_every": 1},
        }
    )  # fmt: skip


def flip_file(folder: Path, numbers: list[float]) -> bool:
    """Flip a bit in a file of a checkpoint, and undo it. Returns whether the error names the file."""
    files = sorted(path for path in folder.glob("*.distcp"))
    # Large files hold most of the state, so each byte is equally likely.
    byte = int(numbers[0] * sum(path.stat().st_size for path in files))
    number = 0
    while byte >= files[number].stat().st_size:
        byte -= files[number].stat().st_size
        number += 1
    file = files[number]
    flip_byte(file, byte, int(numbers[1] * 8))
    try:
        check_hashes(folder, check_sizes(folder))
    except DataError as error:
        is_named = file.name in str(error)
    else:
        is_named = False
    flip_byte(file, byte, int(numbers[1] * 8))
    return is_named


def flip_export(folder: Path, numbers: list[float]) -> bool:
    """Flip a bit of a weight in an exported folder, and undo it. Returns whether the error names file and tensor."""
    file = folder / SINGLE
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    byte = int(numbers[0] * (file.stat().st_size - 8 - size))
    [tensor] = [name for name, (first, last) in places.items() if first <= byte < last]
    flip_byte(file, 8 + size + byte, int(numbers[1] * 8))
    try:
        check_folder(folder)
    except DataError as error:
        is_named = str(error).startswith(f"{file}: {tensor} ")
    else:
        is_named = False
    flip_byte(file, 8 + size + byte, int(numbers[1] * 8))
    # Without the flip the folder must be accepted.
    check_folder(folder)
    return is_named


def flip_byte(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        [value] = stream.read(1)
        stream.seek(byte)
        stream.write(bytes([value ^ (1 << bit)]))


def flip_weights(
    recipe: Recipe, flips: list[tuple[Any, ...]], saved: str, exported: str, num_tokens: int
) -> dict[str, Any]:
    """Make the flips of trainer and engine on a rank. Returns the seconds of a step, and on rank 0 the outcomes."""
    import torch.distributed as dist

    from megarl.groups import signed
    from megarl.worker.colocated import Worker
    from megarl.worker.weight_checks import WeightChecks

    rank = dist.get_rank()
    worker = Worker(rank, LAYOUT.world_size, recipe, LAYOUT, [("here",)] * LAYOUT.world_size)
    assert worker.rank_reshard is not None
    worker.sleep_engine()
    # The first update also initialises libraries. The median of three steps has an index of 1.
    seconds = [train(worker, num_tokens) for _ in range(4)][1:]
    medians = {name: sorted(step[name] for step in seconds)[1] for name in seconds[0]}
    worker.save_checkpoint(Path(saved), False, False)
    worker.finish_checkpoint(True)
    worker.export(Path(exported))
    outcomes = []
    engine = worker.rank_reshard.checks.ledger
    weight_checks = worker.find_part(WeightChecks)
    for place, flipped_rank, *numbers in flips:
        if place not in ("trainer", "engine"):
            continue
        weight_checks.take_checksums(2)
        assert engine is not None
        engine.take(2)
        ledger = weight_checks.ledger if place == "trainer" else engine
        flipped_box = flip(ledger, numbers) if rank == flipped_rank else None
        changes = [weight_checks.compare_weights(), engine.compare()]
        named_boxes = [
            (change.holder.split(" on ")[0], box) for change in changes if change is not None for box in change.boxes
        ]
        per_rank = signed.gather((flipped_box, named_boxes), None, purpose="flips")
        flipped_boxes = [box for box, _ in per_rank if box is not None]
        outcomes.append((place, [box for _, boxes in per_rank for box in boxes] == flipped_boxes))
        if rank == flipped_rank:
            flip(ledger, numbers)
    worker.close()
    return medians | {"outcomes": outcomes if rank == 0 else []}


def flip(ledger: Any, numbers: list[float]) -> tuple[str, Any]:
    """Flip the bit of a weight drawn from three numbers in [0, 1). Returns holder and box. A second call undoes it."""
    import torch

    from megarl.reshard.plan import View
    from megarl.reshard.transport import strided_view

    # Large boxes are hit more often, as by a particle.
    sizes = [piece.box.numel for piece in ledger._layout]
    element = int(numbers[0] * sum(sizes))
    number = 0
    while element >= sizes[number]:
        element -= sizes[number]
        number += 1
    piece = ledger._layout[number]
    view = View(piece.storage, piece.offset, piece.strides)
    values = strided_view(ledger._tensors[piece.storage], view, piece.box.shape, piece.box.name)
    bits = {2: torch.int16, 4: torch.int32}[values.element_size()]
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), piece.box.shape))
    weight = values[index].clone().reshape(1).view(bits)
    weight ^= torch.tensor(1, dtype=bits) << int(numbers[1] * 8 * values.element_size())
    values[index] = weight.view(values.dtype)[0]
    return ledger._holder.split(" on ")[0], piece.box


def train(worker: Any, num_tokens: int) -> dict[str, float]:
    """Update, reshard, compare and sample as a step does. Returns this rank's processor seconds."""
    import numpy as np

    from megarl.data.token_batch import TokenBatch
    from megarl.reshard.checks.ledger import Ledger
    from megarl.types import Request, SamplingSettings, TrainingSequence
    from megarl.worker.weight_checks import WeightChecks

    rng = np.random.default_rng(worker.rank // LAYOUT.tp)
    trained = np.arange(num_tokens) > 0
    token_ids = rng.integers(0, worker.policy.shape.vocab_size, num_tokens)
    row = TokenBatch.from_sequences(
        [
            TrainingSequence(
                token_ids=token_ids,
                loss_mask=trained,
                token_weights=np.where(trained, 1 / num_tokens, 0).astype(np.float32),
                advantages=trained.astype(np.float32),
            )
        ]
    )
    compute, spent = Ledger._compute_checksums, [0.0]

    def timed(ledger: Ledger) -> Any:
        started = time.process_time()
        checksums = compute(ledger)
        spent[0] += time.process_time() - started
        return checksums

    # Each replica samples as many tokens as it trains.
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS)
    requests = [
        Request(f"{number}", token_ids[:8].astype(np.int32), settings, number)
        for number in range(num_tokens // NEW_TOKENS)
    ]
    setattr(Ledger, "_compute_checksums", timed)  # noqa: B010
    started = time.process_time()
    weight_checks = worker.find_part(WeightChecks)
    weight_checks.compare_weights()
    worker.policy.update([row])
    weight_checks.take_checksums(worker.weight_version + 1)
    worker.reshard(False, worker.weight_version + 1)
    worker.advance((requests if worker.engine.is_leader else (), ()), float("inf"), None)
    worker.sleep_engine()
    step = time.process_time() - started
    setattr(Ledger, "_compute_checksums", compute)  # noqa: B010
    return {"checks": spent[0], "step": step}
