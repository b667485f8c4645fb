"""Plans carried out between real ranks, and model folders read and written by them."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.checkpoint.safetensors import FolderReader, export, load
from megarl.checkpoint.weight_checksums import read_stored_checksums
from megarl.config.parallel import ParallelConfig
from megarl.families.model_tensors import hf_tensors, list_copied_prefixes, list_rules
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.model_folder import CHECKSUMS, SINGLE, companion_files
from megarl.reshard import staging
from megarl.reshard.boxes import Box, Piece, dense_piece
from megarl.reshard.checks.fingerprint import MASK, checksum
from megarl.reshard.checks.ledger import Ledger
from megarl.reshard.checks.version_checksums import merge_checksums, sum_by_tensor, version_checksum
from megarl.reshard.layouts.megatron import megatron_layouts, parameter_shapes
from megarl.reshard.plan import RankPlan, make_plan
from megarl.reshard.staging import PrivateSlots, SharedSlots
from megarl.reshard.transport import Transport, _Clock
from megarl.types import DataError
from tests.rank_pool import RankPool
from tests.shapes import small_shape, with_sizes
from tools.make_tiny_model import FAMILIES as TINY
from tools.make_tiny_model import UNTIED

GPU = torch.device("cuda", 0)
LAYOUTS = [
    pytest.param((4, 1, 1), id="tp4"),
    pytest.param((2, 2, 1), id="tp2 pp2"),
    pytest.param((2, 1, 2), id="tp2 dp2"),
    pytest.param((1, 2, 2), id="pp2 dp2"),
]


def small_model(**changes: object) -> ModelShape:
    return with_sizes(small_shape(hidden_size=24, intermediate_size=40, num_layers=2, vocab_size=101), **changes)


def write_folder(folder: Path, model: ModelShape, dtype: torch.dtype = torch.float32) -> Path:
    """A model folder whose weights are random numbers, in two files; the text files are not what JSON would print."""
    folder.mkdir()
    torch.manual_seed(5)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in hf_tensors(model).items()}
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / file).write_bytes(f'{{"file":   "{file}"}}\r\n'.encode())
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": model.hidden_size, "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_word_embeddings,
    }  # fmt: skip
    (folder / "config.json").write_bytes(json.dumps(config).replace(": ", ":   ").encode() + b"\r\n")
    return folder


def shards_of(
    model: ModelShape, parallel: ParallelConfig, dtype: torch.dtype
) -> tuple[tuple, dict[str, torch.Tensor], int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    padded = -(-model.vocab_size // (8 * parallel.tp)) * 8 * parallel.tp
    layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
    shapes = parameter_shapes(layouts, parallel.coordinates(rank))
    # Live parameters of Megatron are views into one buffer.
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.full((sum(sizes),), -7.0, dtype=dtype).split(sizes)
    parameters = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat, strict=True)}
    return layouts, parameters, rank


def round_trip(source: str, target: str, model: ModelShape, first: tuple, second: tuple, dtype: torch.dtype) -> dict:
    """Files -> one Megatron layout -> another -> files."""
    here, there = (ParallelConfig(tp=tp, pp=pp, dp=dp, rollout_tp=1) for tp, pp, dp in (first, second))
    layouts, parameters, rank = shards_of(model, here, dtype)
    load(source, layouts[rank], parameters)
    other_layouts, other, _ = shards_of(model, there, dtype)
    plan = make_plan(layouts, other_layouts, itemsize=dtype.itemsize, bucket_bytes=4096)
    transport = Transport(plan.for_rank(rank), parameters, other, dtype=dtype)
    transport.reshard()
    addresses = [value.data_ptr() for value in other.values()]
    for value in parameters.values():
        value.add_(1)
    moved = transport.reshard()
    assert addresses == [value.data_ptr() for value in other.values()]
    export(target, source, model, other_layouts, rank, other, dtype=dtype, bucket_bytes=4096, shard_bytes=30_000)
    return {**moved.num_bytes, "staging": plan.for_rank(rank).staging_numel * dtype.itemsize}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_round_trip_is_bit_equal(ranks: RankPool, tmp_path: Path, first: tuple[int, int, int], tied: bool) -> None:
    model = small_model(tie_word_embeddings=tied)
    source, target = write_folder(tmp_path / "source", model), tmp_path / "out" / "hf"
    tp, pp, dp = first
    results = ranks.run(round_trip, str(source), str(target), model, first, (1, pp, tp * dp), torch.float32)
    expected = {k: v + 1 for file in ("a", "b") for k, v in load_file(source / f"{file}.safetensors").items()}
    got = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    assert len(list(target.glob("model-0000?-of-0000?.safetensors"))) > 1
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (target / file).read_bytes() == (source / file).read_bytes()
    assert read_stored_checksums(target) == {name: int(checksum(value).item()) & MASK for name, value in got.items()}
    assert [path.name for path in target.parent.iterdir()] == ["hf"]
    assert set(FolderReader(target, model).dtypes.values()) == {torch.float32}
    assert sum(r["sent"] for r in results) == sum(r["received"] for r in results)
    assert (results[0]["received"] > 0) is (tp > 1)
    assert all(r["staging"] <= 4096 for r in results)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, tensor: str, number: float) -> None:
    model = small_model()
    source = write_folder(tmp_path / "source", model, torch.bfloat16)
    file = source / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    weights = load_file(file)
    weights[tensor].view(-1)[-1] = number
    save_file(weights, file)
    layouts, parameters, rank = shards_of(model, ParallelConfig(1, 1, 1, 1), torch.float32)
    with pytest.raises(DataError, match=f"{file}: {tensor} has values that are not finite"):
        load(source, layouts[rank], parameters)


def test_a_bit_flipped_after_the_export_is_named(tmp_path: Path) -> None:
    model = small_model()
    source, target = write_folder(tmp_path / "source", model), tmp_path / "hf"
    layouts, parameters, rank = shards_of(model, ParallelConfig(1, 1, 1, 1), torch.bfloat16)
    export(target, source, model, layouts, rank, parameters, dtype=torch.bfloat16, bucket_bytes=1 << 20)
    assert CHECKSUMS not in companion_files(target)
    boxes, _ = merge_checksums([Ledger("trainer rank 0", layouts[rank], parameters).take_checksums(1)])
    assert json.loads((target / CHECKSUMS).read_text())["weights"] == version_checksum(sum_by_tensor(boxes))
    load(target, layouts[rank], parameters)
    weights = load_file(target / SINGLE)
    for name in weights:
        weights[name].view(torch.int16).view(-1)[-1] ^= 1
        save_file(weights, target / SINGLE)
        with pytest.raises(DataError, match=f"{target / SINGLE}: {name} has the checksum") as caught:
            load(target, layouts[rank], parameters)
        assert str(target / CHECKSUMS) in str(caught.value)
        weights[name].view(torch.int16).view(-1)[-1] ^= 1
    save_file(weights, target / SINGLE)
    text = (target / CHECKSUMS).read_text()
    for changed in (text.replace('"format": 1', '"format": 2'), text.replace("0", "1", 1), text[:-3], "[]"):
        (target / CHECKSUMS).write_text(changed)
        with pytest.raises(DataError, match=f"{target / CHECKSUMS}: "):
            load(target, layouts[rank], parameters)
    (target / CHECKSUMS).unlink()
    load(target, layouts[rank], parameters)


def test_loading_casts_to_the_parameter(tmp_path: Path) -> None:
    model = small_model()
    source = write_folder(tmp_path / "source", model, torch.bfloat16)
    layouts, parameters, rank = shards_of(model, ParallelConfig(1, 1, 1, 1), torch.float32)
    load(source, layouts[rank], parameters)
    stored = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    assert torch.equal(parameters["decoder.final_layernorm.weight"], stored["model.norm.weight"].float())
    head = parameters["output_layer.weight"]
    assert torch.equal(head[:101], stored["lm_head.weight"].float()) and (head[101:] == -7).all()


def test_export_replaces_an_older_one(tmp_path: Path) -> None:
    model = small_model()
    source = write_folder(tmp_path / "source", model)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "stale.txt").touch()
    (tmp_path / ".hf.partial").mkdir()
    layouts, parameters, rank = shards_of(model, ParallelConfig(1, 1, 1, 1), torch.bfloat16)
    export(tmp_path / "hf", source, model, layouts, rank, parameters, dtype=torch.bfloat16, bucket_bytes=1 << 20)
    assert not (tmp_path / "hf" / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "source"]
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def cross_cast() -> list[float]:
    """Rank 0 holds float32, rank 1 wants bfloat16, the wire carries float32."""
    rank = dist.get_rank()
    box = Box("t", (0, 0), (3, 2))
    here, there = (Piece(box, "a", 0, (2, 1)),), (Piece(box, "b", 6, (1, 3)),)
    plan = make_plan([here, (), (), ()], [(), there, (), ()], itemsize=4, bucket_bytes=8)
    source = {"a": torch.arange(6.0).view(3, 2) + 1 / 512} if rank == 0 else {}
    target = {"b": torch.zeros(12, dtype=torch.bfloat16)} if rank == 1 else {}
    Transport(plan.for_rank(rank), source, target, dtype=torch.float32).reshard()
    return [float(x) for x in target.get("b", [])]


def test_wire_casts_and_transposes(ranks: RankPool) -> None:
    exact = [float(torch.tensor(i + 1 / 512).bfloat16()) for i in (0, 2, 4, 1, 3, 5)]
    assert ranks.run(cross_cast) == [[], [0.0] * 6 + exact, [], []]


def between(model: ModelShape, holders: list[int], takers: list[int], shared_memory: bool) -> dict:
    """Trainer ranks to engine ranks, several times over, each time with other weights; returns what is wrong."""
    rank = dist.get_rank()
    sides, storages = [], []
    for members in (holders, takers):
        parallel = ParallelConfig(tp=len(members), pp=1, dp=1, rollout_tp=1)
        of_side = megatron_layouts(model, parallel, padded_vocab_size=128)
        sides.append([of_side[members.index(r)] if r in members else () for r in range(dist.get_world_size())])
        place = parallel.coordinates(members.index(rank) if rank in members else 0)
        shapes = parameter_shapes(of_side, place) if rank in members else {}
        storages.append({name: torch.full(shape, -7.0) for name, shape in shapes.items()})
    plan = make_plan(*sides, itemsize=4, bucket_bytes=6000)
    sources, destinations = storages
    transport = Transport(plan.for_rank(rank), sources, destinations, dtype=torch.float32, shared_memory=shared_memory)
    torch.manual_seed(3)
    wrong = []
    for turn in range(4):
        tensors = {name: torch.randn(shape) for name, shape in hf_tensors(model).items()}
        for piece in sides[0][rank]:
            box_of(piece, sources).copy_(part_of(piece, tensors))
        time.sleep(0.02 * ((rank + turn) % 3))  # ranks come late in turn
        moved = transport.reshard()
        # A peer that still reads must not see what comes next.
        for value in sources.values():
            value.fill_(float("nan"))
        pieces = sides[1][rank]
        wrong += [(turn, p.box.name) for p in pieces if not torch.equal(box_of(p, destinations), part_of(p, tensors))]
    return {
        **moved.num_bytes,
        "wrong": wrong,
        "buckets": len(plan.exchanged),
        "wanted": 4 * sum(p.box.numel for p in pieces),
    }


def box_of(piece: Piece, storages: dict[str, torch.Tensor]) -> torch.Tensor:
    return storages[piece.storage].as_strided(piece.box.shape, piece.strides, piece.offset)


def part_of(piece: Piece, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors[piece.box.name][tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))]


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize(
    ("holders", "takers"),
    [
        pytest.param([0, 1], [2, 3], id="apart"),
        pytest.param([3], [0, 1], id="apart, one idle"),
        pytest.param([0, 1], [1, 2], id="one rank in both"),
        pytest.param([0, 1, 2, 3], [2, 3], id="engines on some"),
        pytest.param([1], [0, 1, 2, 3], id="trainer on one"),
        pytest.param([0, 1, 2, 3], [3, 2, 1, 0], id="all change places"),
    ],
)
def test_trainer_and_engines_may_be_other_ranks(
    ranks: RankPool, holders: list[int], takers: list[int], shared_memory: bool
) -> None:
    results = ranks.run(between, small_model(), holders, takers, shared_memory)
    assert [r["wrong"] for r in results] == [[]] * 4
    assert results[0]["buckets"] > 3
    for rank, result in enumerate(results):
        assert result["local"] + result["received"] == (result["wanted"] if rank in takers else 0)
        assert rank in holders or result["sent"] == 0


def held() -> list[str]:
    """Count the files of shared memory that this process has open, and its mappings."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "megarl-reshard" in line]
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor by which the folder is read
            if "megarl-reshard" in os.readlink(file):
                mapped.append(f"file {file.name}")
    return mapped


def keeps_nothing(num_transports: int) -> tuple[int, list[str]]:
    """Return how many more files are open after `num_transports` transports, and the shared memory that is left."""
    box = Box("t", (0,), (8,))
    rank = dist.get_rank()
    plan = make_plan(
        [(Piece(box, "a", 0, (1,)),), (), (), ()], [(), (Piece(box, "b", 0, (1,)),), (), ()], itemsize=4, bucket_bytes=8
    )
    one = {"a": torch.arange(8.0)} if rank == 0 else {"b": torch.zeros(8)} if rank == 1 else {}
    counts = []
    # The ranks may still hold what earlier tests made there.
    others = set(held())
    for _ in range(1 + num_transports):
        transport = Transport(plan.for_rank(rank), one, one, dtype=torch.float32)
        transport.reshard()
        assert set(held()) - others
        del transport
        counts.append(len(os.listdir("/proc/self/fd")))
    gc.collect()
    ending = time.monotonic() + 60
    while set(held()) - others and time.monotonic() < ending:
        time.sleep(0.01)
    return counts[-1] - counts[0], sorted(set(held()) - others)


def test_stages_on_a_gpu_are_timed_after_its_stream_has_ended_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[torch.device] = []

    class PlayedEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.is_recorded = False

        def record(self) -> None:
            self.is_recorded = True

        def elapsed_time(self, other: PlayedEvent) -> float:
            if not (ended and self.is_recorded and other.is_recorded):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    stream = SimpleNamespace(synchronize=lambda: ended.append(GPU))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    clock = _Clock(GPU)
    with clock.stage("pack"):
        pass
    assert clock.seconds()["pack"] == 1.5


def plan_of_one(num_buckets: int) -> RankPlan:
    """A plan in which this process sends four elements to itself, in each bucket."""
    transfer = SimpleNamespace(source_rank=0, destination_rank=0, numel=4)
    bucket = SimpleNamespace(is_exchanged=True, sends=[transfer], receives=[transfer])
    plan = SimpleNamespace(rank=0, num_ranks=1, buckets=[bucket] * num_buckets, staging_numel=8)
    return cast(RankPlan, plan)


def test_shared_memory_is_open_until_every_rank_has_mapped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def gather(value: Any, group: object) -> list[Any]:
        gathered.append(value)
        _, file, *_ = gathered[0]
        os.fstat(file)  # raises if it is closed
        return [value]

    monkeypatch.setattr(staging, "gather_values", gather)
    SharedSlots(plan_of_one(1), torch.float32, None)
    # The second one is a barrier behind the mapping.
    assert len(gathered) == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gathered[0][1])


@pytest.mark.parametrize(
    ("machines", "expected"),
    [(["a", "a"], True), (["a", "b"], False), (["a", None], False), ([None, None], False)],
    ids=["one machine", "two", "one is unwilling", "both are"],
)
def test_memory_is_shared_by_willing_ranks_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, machines: list[str | None], expected: bool
) -> None:
    monkeypatch.setattr(staging, "gather_values", lambda value, group: machines)
    assert staging.is_one_machine(True, None) is expected


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_rank_says_its_machine_if_it_is_willing_and_stores_are_visible_in_order(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(staging, "gather_values", lambda value, group: said.append(value) or [value])
    monkeypatch.setattr(staging.platform, "machine", lambda: machine)
    assert staging.is_one_machine(True, None) == (machine == "x86_64") and not staging.is_one_machine(False, None)
    assert said[1] is None and (said[0] is None or said[0][-1] == os.getuid())


def test_a_slot_is_not_packed_again_before_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "gather_values", lambda value, group: [value])
    monkeypatch.setattr(SharedSlots, "_PATIENCE_SECONDS", 0.0)
    slots = SharedSlots(plan_of_one(3), torch.float32, None)
    slots.claim(0)
    # Nobody has packed what this rank would read.
    with pytest.raises(TimeoutError):
        slots.arrive()
    slots.depart(0)
    # The other slot is free.
    slots.claim(1)
    slots.depart(1)
    with pytest.raises(TimeoutError):
        slots.claim(2)
    slots.arrive()
    slots.release()
    slots.claim(2)
    # Before a further reshard, both must have been read.
    with pytest.raises(TimeoutError):
        slots.claim(0)
    slots.release()
    slots.claim(0)


def test_the_only_bucket_of_a_plan_has_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Mock()
    monkeypatch.setattr(staging.dist, "all_to_all_single", lambda *_, **__: work)
    slots = PrivateSlots(plan_of_one(1), torch.float32, torch.device("cpu"), None)
    slots.depart(0)
    slots.arrive()
    work.wait.assert_called_once_with()


def test_shared_memory_is_given_back(ranks: RankPool) -> None:
    # Gloo opens connections when they are first needed, now or a moment later: fewer than one a transport.
    for grown, left in ranks.run(keeps_nothing, 20):
        assert grown < 20 and left == []


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        pytest.param("model.norm.weight", None, "model.norm.weight is missing", id="missing"),
        pytest.param("model.norm.weight", (5,), r"model.norm.weight is \(5,\); config.json says \(24,\)", id="shape"),
        pytest.param("model.norm.bias", (24,), "model.norm.bias has no place in a qwen3 model", id="unknown"),
        pytest.param("lm_head.weight", (101, 24), None, id="tied head"),
    ],
)
def test_folder_must_be_the_model(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str | None
) -> None:
    model = small_model(tie_word_embeddings=True)
    tensors = {key: torch.zeros(size) for key, size in hf_tensors(model).items()}
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    if message is None:
        FolderReader(tmp_path, model)
    else:
        with pytest.raises(DataError, match=message):
            FolderReader(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda f: (f / "b.safetensors").unlink(), "b.safetensors: not found", id="missing file"),
        pytest.param(lambda f: (f / "b.safetensors").write_bytes(b"short"), "b.safetensors: cut short", id="truncated"),
        pytest.param(
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"t": "../a.safetensors"}}'),
            "not a file of this folder",
            id="outside",
        ),
        pytest.param(
            lambda f: save_file({"model.norm.weight": torch.zeros(2, dtype=torch.int8)}, f / "b.safetensors"),
            "b.safetensors: ",
            id="integers",
        ),
    ],
)
def test_broken_folders_are_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    folder = write_folder(tmp_path / "source", small_model())
    change(folder)
    with pytest.raises(DataError, match=message):
        FolderReader(folder, small_model())


@pytest.mark.parametrize(
    ("family", "tied"),
    [(family, tied) for family in TINY for tied in (True, False) if not (tied and family in UNTIED)],
)
def test_tables_name_what_transformers_saves(tiny_model: Callable[..., Path], family: str, tied: bool) -> None:
    folder = tiny_model(family=family, tie_word_embeddings=tied)
    model = read_model_shape(folder)
    kept = list_copied_prefixes(model)
    stored = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if not name.startswith(kept)
    }
    reader = FolderReader(folder, model)
    found = {
        name: reader.read_storage(piece.storage).as_strided(piece.box.shape, piece.strides, piece.offset)
        for name, (piece,) in reader.pieces.items()
    }
    assert sum(value.numel() for value in found.values()) == sum(value.numel() for value in stored.values())
    # Experts in packed tensors are tested in tests/families, for gpt-oss and Qwen3.5.
    packed = {piece.storage for (piece,) in reader.pieces.values()} - found.keys()
    assert found.keys() >= stored.keys() - packed
    assert [name for name in stored.keys() - packed if not torch.equal(found[name], stored[name])] == []


def test_two_rules_for_a_parameter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    rules = FAMILIES["llama"].rules(model)
    doubled = dataclasses.replace(FAMILIES["qwen3"], rules=lambda model: (*rules, rules[-1]))
    monkeypatch.setitem(FAMILIES, "qwen3", doubled)
    with pytest.raises(ValueError, match=r"family qwen3 has two rules for output_layer\.weight"):
        list_rules(model)


def test_storage_too_small_is_refused() -> None:
    box = Box("t", (0,), (4,))
    plan = make_plan([(Piece(box, "a", 0, (1,)),)], [(Piece(box, "b", 0, (1,)),)], itemsize=4, bucket_bytes=100)
    with pytest.raises(ValueError, match="t: the reshard's plan needs element 3 of the tensor b, but"):
        Transport(plan.for_rank(0), {"a": torch.zeros(4)}, {"b": torch.zeros(3)}, dtype=torch.float32)
    with pytest.raises(ValueError, match="needs storage a"):
        Transport(plan.for_rank(0), {}, {"b": torch.zeros(4)}, dtype=torch.float32)


def test_float32_tensors_are_never_rounded() -> None:
    """A router's bias is float32 in a plan of 16-bit weights: two units an element."""
    model = small_shape("glm4_moe", num_layers=2, num_experts=3, vocab_size=64)
    layouts = megatron_layouts(model, ParallelConfig(1, 1, 1, 1), padded_vocab_size=64)
    shapes = hf_tensors(model)
    whole = tuple(dense_piece(name, shape, name, 0) for name, shape in shapes.items())
    plan = make_plan(layouts, [whole], itemsize=2, bucket_bytes=1 << 20).for_rank(0)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert [t.numel for bucket in plan.buckets for t in bucket.local if t.name == bias] == [6]
    torch.manual_seed(0)
    parameters = {
        name: torch.randn(shape).to(torch.float32 if name.endswith("expert_bias") else torch.bfloat16)
        for name, shape in parameter_shapes(layouts, layouts.parallel.coordinates(0)).items()
    }
    targets = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"{bias}: the tensor {bias} is torch.bfloat16, .* would change the model"):
        Transport(plan, parameters, targets, dtype=torch.bfloat16)
    Transport(plan, parameters, targets | {bias: (exact := torch.zeros(3))}, dtype=torch.bfloat16).reshard()
    assert torch.equal(exact, parameters["decoder.layers.1.mlp.router.expert_bias"])
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(targets["model.norm.weight"], parameters["decoder.final_layernorm.weight"])
