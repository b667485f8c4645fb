"""Random bit flips in weights of trainer, engine, checkpoint and export are named, by tensor and rank or by file.

A trainer (tp 2, dp 2) shares four ranks with engines (tp 2). Each flip changes one bit of a weight after the checksums
of a version were taken. The comparison before the next use must name exactly this rank and a box with the element. A
flip in a file of a checkpoint must be named by its manifest. A flip in the weights of an exported folder must be named
by file and tensor. Further rows have the cost: the time of all comparisons of a step, relative to an update and a
reshard, and to a whole step, with sampling.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import check_hashes, check_sizes, file_record, write_manifest
from megarl.checkpoint.safetensors import check_folder
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.files.model_folder import SINGLE
from megarl.types import DataError
from tests.rank_pool import RankPool
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "40 s (6 flips)", "full": "1 to 4 minutes (100 flips, a model of width 512)"}
SMALL = {"flips": 6, "hidden_size": 128, "tokens": 64}
LAYOUT = ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2)
NEW_TOKENS = 16
LIMIT = 0.01
"""Largest share of a step's time that the checks may take."""
PLACES = ("trainer", "engine", "checkpoint", "export")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=int, default=100, help="in all places together")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048, help="trained by an update, on each replica")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    draw = random.Random(options.seed)
    places = [PLACES[index % len(PLACES)] for index in range(options.flips)]
    # Rank, and numbers from which the rank draws tensor, element and bit.
    wanted = [
        (place, draw.randrange(LAYOUT.world_size), draw.random(), draw.random(), draw.random()) for place in places
    ]
    with tempfile.TemporaryDirectory(prefix="megarl-flips-") as name, RankPool(LAYOUT.world_size) as pool:
        folder = Path(name)
        make_tiny_model(
            folder / "model", hidden_size=options.hidden_size, num_layers=options.layers, num_heads=8, num_kv_heads=4,
            intermediate_size=3 * options.hidden_size,
        )  # fmt: skip
        recipe = recipe_of(folder / "model", options.tokens)
        saved = folder / "checkpoint"
        saved.mkdir()
        found = pool.run(flipped, recipe, wanted, str(saved), str(folder / "hf"), options.tokens)
        for place in PLACES[:2]:
            yield row_of(place, [outcome for outcome in found[0]["outcomes"] if outcome["place"] == place])
        files = {path.name: file_record(path) for path in saved.iterdir()}
        write_manifest(saved, files, {"format": "torch_dist"})
        yield row_of(
            "checkpoint", [flip_file(saved, numbers) for place, _, *numbers in wanted if place == "checkpoint"]
        )
        yield row_of("export", [flip_export(folder / "hf", n) for place, _, *n in wanted if place == "export"])
    # Processor time of all ranks: unlike wall time, it hardly depends on other programs.
    seconds = {name: sum(rank[name] for rank in found) for name in ("checks", "step", "whole")}
    for place, name in (("cost of update and reshard", "step"), ("cost of a whole step", "whole")):
        row = row_of(place, []) | {
            "checks ms": 1e3 * seconds["checks"],
            "step ms": 1e3 * seconds[name],
            "share": seconds["checks"] / seconds[name],
        }
        # The limit is for a step of a model whose time is not in the calls of operators.
        del row["met"]
        yield row if name == "step" or options.size == "small" else row | {"met": row["share"] <= LIMIT}


def row_of(place: str, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table's row of one place: the number of flips, and of those named correctly."""
    named = sum(outcome["is_named"] for outcome in outcomes)
    return {
        "place": place,
        "flips": len(outcomes),
        "named": named,
        "checks ms": 0.0,
        "step ms": 0.0,
        "share": 0.0,
        "met": bool(outcomes) and named == len(outcomes),
    }


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


def flip_file(folder: Path, numbers: list[float]) -> dict[str, Any]:
    """Flip a bit in a file of a checkpoint, and undo it after the check. Return whether the error names the file."""
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
    return {"place": "checkpoint", "is_named": is_named}


def flip_export(folder: Path, numbers: list[float]) -> dict[str, Any]:
    """Flip a bit of a weight in an exported folder, and undo it. Return whether the error names file and tensor."""
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
    return {"place": "export", "is_named": is_named}


def flip_byte(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        [value] = stream.read(1)
        stream.seek(byte)
        stream.write(bytes([value ^ (1 << bit)]))


def flipped(
    recipe: Recipe, wanted: list[tuple[Any, ...]], saved: str, exported: str, num_tokens: int
) -> dict[str, Any]:
    """Make the flips of trainer and engine on a rank. Return the outcomes, on rank 0, and the seconds of a step."""
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
    own = {name: sorted(one[name] for one in seconds)[1] for name in seconds[0]}
    worker.save_checkpoint(Path(saved), False, False)
    worker.finish_checkpoint(True)
    worker.export(Path(exported))
    outcomes = []
    engine = worker.rank_reshard.checks.ledger
    weight_checks = worker.find_part(WeightChecks)
    for place, at, *numbers in wanted:
        if place not in ("trainer", "engine"):
            continue
        weight_checks.take_checksums(2)
        assert engine is not None
        engine.take(2)
        ledger = weight_checks.ledger if place == "trainer" else engine
        target = flip(ledger, numbers) if rank == at else None
        changes = [weight_checks.compare_weights(), engine.compare()]
        named = [(change.holder, box) for change in changes if change is not None for box in change.boxes]
        everywhere = signed.gather((target, named), None, purpose="flips")
        [wanted_box] = [one for one, _ in everywhere if one is not None]
        found = [box for _, boxes in everywhere for box in boxes]
        is_named = wanted_box in [(holder.split(" on ")[0], box) for holder, box in found] and len(found) == 1
        outcomes.append({"place": place, "is_named": is_named})
        if rank == at:
            flip(ledger, numbers)
    worker.close()
    return own | {"outcomes": outcomes if rank == 0 else []}


def flip(ledger: Any, numbers: list[float]) -> tuple[str, Any]:
    """Flip the bit of a weight drawn from three numbers in [0, 1). Return holder and box. A second call undoes it."""
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
    one = values[index].clone().reshape(1).view(bits)
    one ^= torch.tensor(1, dtype=bits) << int(numbers[1] * 8 * values.element_size())
    values[index] = one.view(values.dtype)[0]
    return ledger._holder.split(" on ")[0], piece.box


def train(worker: Any, num_tokens: int) -> dict[str, float]:
    """Update, reshard, compare and sample as a step does. Return this rank's processor seconds of each part."""
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
    compute, spent = Ledger._compute, [0.0]

    def timed(ledger: Ledger) -> Any:
        started = time.process_time()
        found = compute(ledger)
        spent[0] += time.process_time() - started
        return found

    # Each replica samples as many tokens as it trains.
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS)
    asked = [
        Request(f"{number}", token_ids[:8].astype(np.int32), settings, number)
        for number in range(num_tokens // NEW_TOKENS)
    ]
    setattr(Ledger, "_compute", timed)  # noqa: B010
    started = time.process_time()
    weight_checks = worker.find_part(WeightChecks)
    weight_checks.compare_weights()
    worker.policy.update([row])
    weight_checks.take_checksums(worker.weight_version + 1)
    worker.reshard(False, worker.weight_version + 1)
    sampling = time.process_time()
    worker.advance((asked if worker.engine.is_leader else (), ()), float("inf"), None)
    sampling = time.process_time() - sampling
    worker.sleep_engine()
    whole = time.process_time() - started
    setattr(Ledger, "_compute", compute)  # noqa: B010
    return {"checks": spent[0], "step": whole - sampling, "whole": whole}
