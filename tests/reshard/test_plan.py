"""Megatron's layout joined with an engine's, proved on integers against shapes written out by hand."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.parallel import RANK_ORDERS, ParallelConfig
from megarl.families.model_tensors import hf_tensors, list_aliases
from megarl.families.parts import Latent
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides
from megarl.reshard.forecast.cost_model import forecast, list_rank_orders, measure_traffic
from megarl.reshard.layouts.megatron import megatron_layouts, parameter_shapes
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.plan import Plan, RankPlan, Transfer, make_plan
from tests.shapes import SIGMOID, small_shape


def full_tensors(model: ModelShape) -> dict[str, np.ndarray]:
    """Every element of the model has a number of its own."""
    tensors, start = {}, 1
    for name, shape in hf_tensors(model).items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(start, start + count).reshape(shape)
        start += count
    return tensors


def engine_parameters(
    model: ModelShape, tensors: dict[str, np.ndarray], tp: int, rank: int, ep: bool = False
) -> dict[str, np.ndarray]:
    """Return the tensors that one engine rank must hold, sliced from full ones. -1 is padding."""
    # The engine has the language model alone, without the name of its place in a model with a vision tower.
    tensors = {name.replace("model.language_model.", "model."): value for name, value in tensors.items()}
    heads, kv_heads, width = model.num_heads // tp, max(1, model.num_kv_heads // tp), model.head_dim
    first_kv = rank * kv_heads if model.num_kv_heads >= tp else rank // (tp // model.num_kv_heads)

    def part(x: np.ndarray, dim: int = 0) -> np.ndarray:
        return np.split(x, tp, axis=dim)[rank]

    def padded(x: np.ndarray) -> np.ndarray:
        return part(np.pad(x, ((0, -len(x) % 64), (0, 0)), constant_values=-1))

    held = {"model.embed_tokens.weight": padded(tensors["model.embed_tokens.weight"])}
    held["model.norm.weight"] = tensors["model.norm.weight"]
    if not model.tie_word_embeddings:
        held["lm_head.weight"] = padded(tensors["lm_head.weight"])
    for number, kind_of_layer in enumerate(model.layers):
        layer = f"model.layers.{number}."
        is_latent = isinstance(model.attention, Latent)
        is_linear = kind_of_layer.mixer == "linear_attention"
        if is_latent:
            held |= latent_of_rank(model, tensors, layer + "self_attn.", part)
        if is_linear:
            held |= engine_delta_net(model, tensors, layer + "linear_attn.", part)
        kinds = ("weight", "bias") if model.attention.qkv_bias else ("weight",)
        for kind in () if is_linear or is_latent else kinds:
            q, k, v = (tensors[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows = slice(first_kv * width, (first_kv + kv_heads) * width)
            rows_of_head = width * (2 if model.attention.has_output_gate else 1)
            own = q[rank * heads * rows_of_head : (rank + 1) * heads * rows_of_head]
            held[f"{layer}self_attn.qkv_proj.{kind}"] = np.concatenate([own, k[rows], v[rows]])
        copies = ["input_layernorm", "post_attention_layernorm"]
        if not is_linear:
            held[layer + "self_attn.o_proj.weight"] = part(tensors[layer + "self_attn.o_proj.weight"], 1)
            copies += ["self_attn.q_norm", "self_attn.k_norm"] if model.attention.qk_norm and not is_latent else []
        dense = "mlp"
        if kind_of_layer.has_experts:
            is_glm = model.family in SIGMOID
            shared = "mlp.shared_experts" if is_glm else "mlp.shared_expert"
            copies, dense = [*copies, "mlp.gate"], shared if model.shared_intermediate_size else None
            copies += ["mlp.shared_expert_gate"] if dense and not is_glm else []
            if is_glm:
                bias = layer + "mlp.gate.e_score_correction_bias"
                held[bias] = tensors[bias]
            # Contiguous runs, the first ranks hold one more.
            local = np.array_split(np.arange(model.num_experts), tp)[rank] if ep else range(model.num_experts)
            whole = (lambda x, dim=0: x) if ep else part
            gates, ups, downs = (
                [tensors[f"{layer}mlp.experts.{e}.{x}_proj.weight"] for e in local] for x in ("gate", "up", "down")
            )
            w13 = [np.concatenate([whole(gate), whole(up)]) for gate, up in zip(gates, ups, strict=True)]
            held[layer + "mlp.experts.routed_experts.w13_weight"] = np.stack(w13)
            held[layer + "mlp.experts.routed_experts.w2_weight"] = np.stack([whole(down, 1) for down in downs])
        if dense:
            gate, up = (part(tensors[f"{layer}{dense}.{x}_proj.weight"]) for x in ("gate", "up"))
            held[f"{layer}{dense}.gate_up_proj.weight"] = np.concatenate([gate, up])
            held[f"{layer}{dense}.down_proj.weight"] = part(tensors[f"{layer}{dense}.down_proj.weight"], 1)
        held |= {f"{layer}{name}.weight": tensors[f"{layer}{name}.weight"] for name in copies}
    return held


def latent_of_rank(
    model: ModelShape, tensors: dict[str, np.ndarray], inside: str, part: Callable[..., np.ndarray]
) -> dict[str, np.ndarray]:
    """What a rank's engine has of a layer's latent attention without its output projection, by parameter."""
    down = tensors[inside + "kv_a_proj_with_mqa.weight"]
    held = {inside + "kv_a_layernorm.weight": tensors[inside + "kv_a_layernorm.weight"]}
    held[inside + "kv_b_proj.weight"] = part(tensors[inside + "kv_b_proj.weight"])
    if not model.attention.query_rank:
        return held | {
            inside + "q_proj.weight": part(tensors[inside + "q_proj.weight"]),
            inside + "kv_a_proj_with_mqa.weight": down,
        }
    return held | {
        inside + "q_a_layernorm.weight": tensors[inside + "q_a_layernorm.weight"],
        inside + "q_b_proj.weight": part(tensors[inside + "q_b_proj.weight"]),
        inside + "fused_qkv_a_proj.weight": np.concatenate([tensors[inside + "q_a_proj.weight"], down]),
    }


def engine_delta_net(
    model: ModelShape, tensors: dict[str, np.ndarray], inside: str, part: Callable[..., np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the parameters of a delta-net that one engine rank must hold."""
    linear = model.linear_attention
    assert linear is not None
    keys = linear.num_key_heads * linear.key_dim

    def each(x: np.ndarray) -> list[np.ndarray]:
        """Return the rank's queries, keys and values."""
        return [part(block) for block in np.split(x, [keys, 2 * keys])]

    own = {name: tensors[inside + name] for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")}
    held = {inside + name: part(own[name]) for name in ("A_log", "dt_bias")}
    held[inside + "conv1d.weight"] = np.concatenate(each(own["conv1d.weight"]))
    held[inside + "norm.weight"] = own["norm.weight"]
    held[inside + "out_proj.weight"] = part(tensors[inside + "out_proj.weight"], 1)
    if model.family == "qwen3_next":
        return held | {
            f"{inside}{x}.weight": part(tensors[f"{inside}{x}.weight"]) for x in ("in_proj_qkvz", "in_proj_ba")
        }
    projections = {x: tensors[f"{inside}in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a")}
    wide = [*each(projections["qkv"]), part(projections["z"])]
    held[inside + "in_proj_qkvz.weight"] = np.concatenate(wide)
    held[inside + "in_proj_ba.weight"] = np.concatenate([part(projections["b"]), part(projections["a"])])
    return held


def layout_of(held: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> Layout:
    """The pieces of storages whose elements are numbered as `full_tensors` numbers them."""
    # Elements are numbered tensor by tensor, so the starts are in ascending order and can be searched by halves.
    names, starts = list(tensors), [int(value.flat[0]) for value in tensors.values()]
    rows = [(int(t.flat[0]), int(t.flat[-1]), int(np.prod(t.shape[1:]))) for t in tensors.values()]
    pieces: list[Piece] = []
    for storage, stacked in held.items():
        for index, value in enumerate(stacked if "routed_experts" in storage else [stacked]):
            strides = contiguous_strides(value.shape)
            heads = value.reshape(len(value), -1)[:, 0].tolist()
            owners = [bisect_right(starts, head) - 1 for head in heads]
            adjacent = [_adjacent(a, b, rows[owner]) for (a, b), owner in zip(pairwise(heads), owners, strict=False)]
            breaks = [0, *(i for i, is_adjacent in enumerate(adjacent, 1) if not is_adjacent)]
            for low, high in pairwise([*breaks, len(heads)]):
                if heads[low] < 0:
                    continue
                name = names[owners[low]]
                corner = np.unravel_index(heads[low] - tensors[name].flat[0], tensors[name].shape)
                stop = tuple(int(c) + n for c, n in zip(corner, (high - low, *value.shape[1:]), strict=True))
                box = Box(name, tuple(map(int, corner)), stop)
                pieces.append(Piece(box, storage, index * value.size + int(low) * strides[0], strides))
    return tuple(pieces)


def by_row(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the rows of pieces: neighbouring pieces of a tensor may be one."""
    for piece in pieces:
        box = piece.box
        for row in range(box.start[0], box.stop[0]):
            start, stop = (row, *box.start[1:]), (row + 1, *box.stop[1:])
            offset = piece.offset + (row - box.start[0]) * piece.strides[0]
            yield Piece(Box(box.name, start, stop), piece.storage, offset, piece.strides)


def _adjacent(a: int, b: int, rows: tuple[int, int, int]) -> bool:
    """Return whether elements begin consecutive rows of a tensor, given its first and last element and a row's size."""
    first, last, row = rows
    return first <= a and b <= last and b - a == row


def fill(layout: Layout, shapes: dict[str, tuple[int, ...]], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    storages = {name: np.full(shape, -1) for name, shape in shapes.items()}
    for piece in layout:
        flat = storages[piece.storage].reshape(-1)
        part = tensors[piece.box.name][tuple(map(slice, piece.box.start, piece.box.stop))]
        strided(flat, piece.offset, part.shape, piece.strides)[...] = part
    return storages


def strided(flat: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= offset <= last < flat.size, "a view leaves its storage"
    # A fifth of the time of `as_strided`, and numpy checks the bounds once more.
    steps = [s * flat.itemsize for s in strides]
    return np.ndarray(shape, flat.dtype, flat.data, offset * flat.itemsize, steps)


@lru_cache(maxsize=1)
def rank_plans(plan: Plan) -> list[RankPlan]:
    """Return the parts of all ranks. The newest plan's are retained: a case reads them several times."""
    return [plan.for_rank(rank) for rank in range(plan.num_ranks)]


def transfers(plan: Plan) -> list[list[Transfer]]:
    """All ranks' transfers, bucket by bucket."""
    ranks = [part.buckets for part in rank_plans(plan)]
    return [[t for b in buckets for t in (*b.local, *b.receives)] for buckets in zip(*ranks, strict=True)]


def intersect(one: Box, other: Box) -> Box | None:
    """The elements both boxes hold, or None."""
    start, stop = tuple(map(max, one.start, other.start)), tuple(map(min, one.stop, other.stop))
    return Box(one.name, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def subtract(whole: Box, part: Box) -> list[Box]:
    """Return `whole` without `part`, which must lie inside it: at most two boxes per dimension."""
    rest: list[Box] = []
    start, stop = list(whole.start), list(whole.stop)
    for dim, (low, high) in enumerate(zip(part.start, part.stop, strict=True)):
        if start[dim] < low:
            rest.append(Box(whole.name, tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
        if high < stop[dim]:
            rest.append(Box(whole.name, (*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
        start[dim], stop[dim] = low, high
    return rest


def execute(plan: Plan, sources: list[dict[str, np.ndarray]], targets: list[dict[str, np.ndarray]]) -> None:
    """Carry a plan out on numpy storages, refusing to write an element twice."""
    for bucket in transfers(plan):
        for t in bucket:
            there = strided(
                sources[t.source_rank][t.source.storage].reshape(-1), t.source.offset, t.shape, t.source.strides
            )
            target = targets[t.destination_rank][t.destination.storage].reshape(-1)
            here = strided(target, t.destination.offset, t.shape, t.destination.strides)
            assert (here == -1).all(), f"{t.name} is written twice"
            here[...] = there


def lower_bound(sources: Sequence[Layout], destinations: Sequence[Layout]) -> list[int]:
    """The least elements each rank must receive: its destination minus what its own source holds, box by box."""
    bounds: list[int] = []
    for own, wanted in zip(sources, destinations, strict=True):
        held: dict[str, list[Box]] = {}
        for piece in own:
            held.setdefault(piece.box.name, []).append(piece.box)
        missing = 0
        for piece in wanted:
            holes = [piece.box]
            for box in held.get(piece.box.name, ()):
                parts = [(hole, intersect(hole, box)) for hole in holes]
                holes = [rest for hole, part in parts for rest in (subtract(hole, part) if part else [hole])]
            missing += sum(hole.numel for hole in holes)
        bounds.append(missing)
    return bounds


def reshard_case(model: ModelShape, parallel: ParallelConfig, bucket_bytes: int = 1 << 20, te: bool = False) -> Plan:
    """Fill Megatron's shards, run the plan, compare every engine rank with the slices; returns the plan."""
    padded = -(-model.vocab_size // (4 * parallel.tp)) * 4 * parallel.tp
    tensors = full_tensors(model)
    sources = megatron_layouts(model, parallel, padded_vocab_size=padded, transformer_engine=te)
    ranks = range(parallel.world_size)
    shards = []
    for rank in ranks:
        at = parallel.coordinates(rank)
        shapes = parameter_shapes(sources, at)
        shards.append(fill(sources[rank], shapes, tensors))
    engine, ep = parallel.rollout_tp, parallel.rollout_ep
    # Replicas of the engine hold the same, so the slices and layouts of the first one are those of all.
    of_engine = [engine_parameters(model, tensors, engine, rank, ep) for rank in range(engine)]
    expected = [of_engine[rank % engine] for rank in ranks]
    wanted = VllmLayouts(model, engine, parallel.world_size, ep)
    own = [*wanted]
    for layout, held in zip(own, of_engine, strict=False):
        assert sorted(by_row(layout)) == sorted(by_row(layout_of(held, tensors)))
    assert all(own[rank] == own[rank % engine] for rank in ranks)
    plan = make_plan(sources, wanted, itemsize=8, bucket_bytes=bucket_bytes, topology=[(r // 4,) for r in ranks])
    live = [{name: np.full_like(value, -1) for name, value in held.items()} for held in expected]
    execute(plan, shards, live)
    for held, got in zip(expected, live, strict=True):
        for name, value in held.items():
            assert np.array_equal(got[name], value), name
    received = [0] * parallel.world_size
    for transfer in (t for bucket in transfers(plan) for t in bucket if t.source_rank != t.destination_rank):
        received[transfer.destination_rank] += transfer.numel
    assert received == lower_bound(sources, own)
    traffic = measure_traffic(plan)
    assert (traffic.lower_bound // 8).tolist() == (traffic.received[1:].sum(0) // 8).tolist() == received
    assert traffic.ratio == 1.0
    return plan


def layout(tp: int = 1, pp: int = 1, dp: int = 1, rollout_tp: int = 1, **sizes: Any) -> ParallelConfig:
    return ParallelConfig(tp=tp, pp=pp, dp=dp, rollout_tp=rollout_tp, **sizes)


PLAIN = [name for name in FAMILIES if not list_aliases(small_shape(name))]
"""Families whose engines hold plain slices of experts. tests/reshard/layouts compares the others with vLLM's own."""


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(layout(), id="one"),
        pytest.param(layout(pp=2, rollout_tp=2), id="pp2 to tp2"),
        pytest.param(layout(tp=2, dp=2, rollout_tp=4, ep=2, etp=2), id="tp2 dp2 ep2 etp2 to tp4"),
        pytest.param(layout(tp=2, pp=2, vpp=2, rollout_tp=2, ep=2), id="tp2 pp2 vpp2 ep2 to tp2"),
        pytest.param(layout(tp=2, cp=2, dp=2, rollout_tp=4, ep=4, rollout_ep=True), id="cp2 ep4 to tp4 ep4"),
        pytest.param(layout(tp=8, rollout_tp=8, ep=2), id="tp8"),
    ],
)
def test_engines_get_every_element_once(family: str, tied: bool, parallel: ParallelConfig) -> None:
    model = small_shape(family, num_layers=parallel.pp * parallel.vpp, tie_word_embeddings=tied)
    reshard_case(model, parallel, te=tied)


# 40 random cases take 20 s to 50 s of processor time, and much longer on a machine shared with others.
@pytest.mark.timeout(1200)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_and_layout(data: st.DataObject) -> None:
    def one_of(sizes: Iterable[int]) -> int:
        return data.draw(st.sampled_from(list(sizes)))

    tp, pp = one_of([1, 2, 4]), one_of([1, 2, 3])
    cp, dp = one_of([1, 2]), one_of([1, 2])
    world = tp * pp * cp * dp
    rollout_tp = one_of(n for n in (1, 2, 4) if world % n == 0)
    etp = one_of(n for n in (1, 2) if world // pp % n == 0)
    ep = one_of(n for n in (1, 2, 4) if world // pp % (n * etp) == 0)
    parallel = layout(
        tp, pp, dp, rollout_tp, cp=cp, ep=ep, etp=etp, rollout_ep=data.draw(st.booleans()),
        vpp=one_of([1, 2]) if pp > 1 else 1,
        rank_permutation=(2, 2) if world % 4 == 0 and data.draw(st.booleans()) else (1, 1),
    )  # fmt: skip
    kv_heads = one_of([1, 2, 4])
    widest = max(tp, rollout_tp, kv_heads)
    family = data.draw(st.sampled_from(sorted(PLAIN)))
    router = small_shape(family).router
    routed: dict[str, Any] = {}
    if router:
        routed["num_experts"] = max(ep, rollout_tp) * one_of([1, 2, 3])
        routed["moe_intermediate_size"] = 4 * data.draw(st.integers(1, 3))
    if router and router.shared_intermediate_size:
        routed["shared_intermediate_size"] = widest * 2
    model = small_shape(
        family,
        num_kv_heads=kv_heads,
        num_heads=widest * one_of([1, 2, 3]),
        head_dim=one_of([4, 8]),
        intermediate_size=widest * data.draw(st.integers(1, 5)),
        hidden_size=data.draw(st.integers(1, 9)),
        num_layers=pp * parallel.vpp * one_of([1, 2]),
        vocab_size=data.draw(st.integers(1, 200)),
        tie_word_embeddings=data.draw(st.booleans()),
        **routed,
    )
    bucket_bytes = one_of([100, 3000, 1 << 20])
    plan = reshard_case(model, parallel, bucket_bytes, te=data.draw(st.booleans()))
    # No slice is smaller than a row.
    largest_row = 8 * world * max(shape[-1] for shape in hf_tensors(model).values() if len(shape) > 1)
    staged = [part.staging_numel * 8 for part in rank_plans(plan)]
    assert max(staged) <= max(bucket_bytes, 2 * largest_row)


def test_query_groups_become_one_copy_each() -> None:
    plan = reshard_case(small_shape(num_kv_heads=4, num_layers=1), layout())
    copies = [t for bucket in transfers(plan) for t in bucket if t.destination.storage.endswith("qkv_proj.weight")]
    assert sorted((t.name.rpartition("self_attn.")[2], t.shape) for t in copies) == [
        ("k_proj.weight", (4, 4, 8)),
        ("q_proj.weight", (4, 8, 8)),
        ("v_proj.weight", (4, 4, 8)),
    ]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(layout(dp=4), id="tp1"),
        pytest.param(layout(tp=2, dp=4, rollout_tp=2), id="tp2"),
        pytest.param(layout(tp=4, dp=2, rollout_tp=4, ep=4, rollout_ep=True), id="tp4 ep4"),
        # The shards nest once neighbours of an engine hold neighbouring parts.
        pytest.param(layout(tp=2, dp=2, rollout_tp=4, ep=2, rollout_ep=True, rank_permutation=(2, 2)), id="dealt"),
    ],
)
def test_nested_layouts_move_nothing(parallel: ParallelConfig) -> None:
    plan = reshard_case(small_shape("qwen3_moe", vocab_size=256, num_kv_heads=4), parallel)
    assert measure_traffic(plan).received[1:].sum() == 0 and not any(plan.exchanged)


def test_a_deal_saves_what_the_naive_order_loses() -> None:
    """tp4 to tp2 on four ranks: half of the ranks hold no part of what they need, unless they are dealt apart."""
    model = small_shape(num_kv_heads=4, vocab_size=256)
    received = [
        measure_traffic(reshard_case(model, layout(4, 1, 1, 2, rank_permutation=rank_permutation))).received[1:].sum()
        for rank_permutation in ((1, 1), (2, 2))
    ]
    split = 8 * sum(np.prod(s) for name, s in hf_tensors(model).items() if "norm" not in name)
    # Each engine rank holds a half; it has nothing or a quarter of the model, and needs the rest.
    assert received == [2 * split // 2 + 2 * split // 4, 4 * split // 4]


@pytest.mark.parametrize(
    ("switches", "taken"),
    [
        pytest.param("aaa", {(0, 4): 40, (3, 4): 40, (0, 5): 40, (3, 5): 40}, id="one"),
        pytest.param("abb", {(3, 4): 80, (3, 5): 80}, id="the second node's"),
        pytest.param("abc", {(0, 4): 40, (3, 4): 40, (0, 5): 40, (3, 5): 40}, id="one each"),
    ],
)
def test_nearest_replica_and_balanced_senders(switches: str, taken: dict[tuple[int, int], int]) -> None:
    """Two nodes of two ranks hold the tensors twice; the third takes from the nearest, of equals alike."""
    boxes = [Box(f"layers.{i}.t", (0,), (10,)) for i in range(8)]
    holds = tuple(Piece(box, "s", 10 * i, (1,)) for i, box in enumerate(boxes))
    sources = [holds, (), (), holds, (), ()]
    wants = [(), holds, holds, (), holds, holds]
    topology = [(node, switches[node]) for node in (0, 0, 1, 1, 2, 2)]
    plan = make_plan(sources, wants, itemsize=2, bucket_bytes=1000, topology=topology)
    found: dict[tuple[int, int], int] = {}
    for t in (t for bucket in transfers(plan) for t in bucket):
        found[t.source_rank, t.destination_rank] = found.get((t.source_rank, t.destination_rank), 0) + t.numel
    assert found == {(0, 1): 80, (3, 2): 80} | taken


def test_senders_share_the_load() -> None:
    """Each of 32 ranks sends about as much as it receives, in all and in each bucket."""
    model = small_shape("qwen3_moe", num_layers=16, num_experts=16, hidden_size=64, moe_intermediate_size=64)
    parallel = layout(tp=2, pp=2, dp=8, rollout_tp=4, ep=8, rollout_ep=True)
    plan = make_plan(
        megatron_layouts(model, parallel, padded_vocab_size=64), VllmLayouts(model, 4, 32, True),
        itemsize=2, bucket_bytes=1 << 20, topology=[(rank // 8,) for rank in range(32)],
    )  # fmt: skip
    traffic = measure_traffic(plan)
    assert traffic.sent[1:].sum(0).max() < 1.1 * traffic.received[1:].sum(0).mean()
    staged = [plan.for_rank(rank).staging_numel * 2 for rank in range(32)]
    assert max(staged) <= 1 << 20 and min(staged) > 0.7 * max(staged)
    assert traffic.staging.max() == pytest.approx(max(staged), rel=0.01)


def test_experts_are_read_where_a_tensor_stacks_them() -> None:
    """Engines of two ranks send to engines of one, and the other way round."""
    model = small_shape("qwen3_moe")
    tensors = full_tensors(model)
    for is_first, sizes in ((True, (2, 1)), (False, (1, 2))):
        sides = [VllmLayouts(model, tp, 2, ep=tp == 2) for tp in sizes]
        held = [[engine_parameters(model, tensors, tp, rank % tp, ep=tp == 2) for rank in range(2)] for tp in sizes]
        live = [{name: np.full_like(value, -1) for name, value in of_rank.items()} for of_rank in held[1]]
        execute(make_plan(*sides, itemsize=8, bucket_bytes=1 << 12), held[0], live)
        for expected, got in zip(held[1], live, strict=True):
            for name, value in expected.items():
                assert np.array_equal(got[name], value), (is_first, name)


@pytest.mark.parametrize("rows", [15, 16, 17, 31, 32, 33, 64, 100])
def test_a_tensor_larger_than_a_bucket_is_sent_in_slices_of_at_most_half(rows: int) -> None:
    """A bucket with one slice has room for a slice of another tensor."""
    first, second = ((Piece(Box(name, (0, 0), (rows, 8)), name, 0, (8, 1)),) for name in ("a", "b"))
    plan = make_plan([(*first, *second), ()], [(), (*first, *second)], itemsize=4, bucket_bytes=4 * 128)
    slices = [t.numel for bucket in transfers(plan) for t in bucket]
    assert sum(slices) == 2 * 8 * rows and max(slices) <= 64
    assert all(plan.for_rank(rank).staging_numel <= 128 for rank in (0, 1))


def test_counts_are_those_of_the_transfers() -> None:
    plan = reshard_case(small_shape("qwen2_moe"), layout(tp=2, pp=2, dp=2, rollout_tp=4, ep=2), bucket_bytes=3000)
    traffic, nodes = measure_traffic(plan), [rank // 4 for rank in range(8)]
    received, copies, messages = np.zeros((3, 8), int), np.zeros(8, int), 0
    for bucket in transfers(plan):
        messages += len({(t.source_rank, t.destination_rank) for t in bucket if t.source_rank != t.destination_rank})
        for t in bucket:
            local, near = t.source_rank == t.destination_rank, nodes[t.source_rank] == nodes[t.destination_rank]
            received[0 if local else 1 if near else 2, t.destination_rank] += 8 * t.numel
            for rank in {t.source_rank, t.destination_rank}:
                copies[rank] += 1
    assert (traffic.received == received).all() and received.sum(1).all()
    assert (traffic.copies == copies).all() and traffic.messages == messages
    assert traffic.buckets == len(plan.exchanged) > 1


def test_recorded_and_computed_layouts_make_the_same_transfers() -> None:
    model, parallel = small_shape("qwen3_moe"), layout(tp=2, pp=2, dp=2, rollout_tp=4, ep=2, etp=2)
    sources = megatron_layouts(model, parallel, padded_vocab_size=64)
    wanted = VllmLayouts(model, 4, 8)
    plans = [
        make_plan(a, b, itemsize=2, bucket_bytes=4096, topology=[(0,)] * 8)
        for a, b in ((sources, wanted), (sources, [*wanted]), ([*sources], [*wanted]))
    ]

    def moved(plan: Plan) -> list:
        return sorted((t.destination_rank, t.name, t.shape, t.destination) for b in transfers(plan) for t in b)

    assert moved(plans[0]) == moved(plans[1]) == moved(plans[2])


def test_plan_is_a_function_of_the_layouts_alone() -> None:
    digests = {reshard_case(small_shape(), layout(2, 2, 1, 2), 3000).digest() for _ in range(2)}
    other = reshard_case(small_shape(), layout(2, 2, 1, 4), 3000).digest()
    assert len(digests) == 1 and other not in digests


def test_sends_and_receives_of_a_pair_agree() -> None:
    plan = reshard_case(small_shape("qwen3_moe"), layout(2, 2, 1, 4, ep=2), 2000)
    ranks = [plan.for_rank(rank) for rank in range(4)]
    assert len({len(rank.buckets) for rank in ranks}) == 1
    for index in range(len(plan.exchanged)):
        for a in range(4):
            for b in range(4):
                sent = [t for t in ranks[a].buckets[index].sends if t.destination_rank == b]
                assert sent == [t for t in ranks[b].buckets[index].receives if t.source_rank == a]


def test_overlapping_sources_are_cut_apart() -> None:
    """Rank 0 holds rows 0 to 4, rank 1 rows 2 to 6; each takes the other's from the other, and row 2 or 3 from none."""
    sources = [(Piece(Box("t", (a, 0), (a + 4, 3)), "s", 0, (3, 1)),) for a in (0, 2)]
    wants = [(Piece(Box("t", (0, 0), (6, 3)), "d", 0, (3, 1)),)] * 2
    plan = make_plan(sources, wants, itemsize=2, bucket_bytes=1000)
    moved = {
        (t.source_rank, t.destination_rank): t.numel
        for b in transfers(plan)
        for t in b
        if t.source_rank != t.destination_rank
    }
    assert moved == {(1, 0): 6, (0, 1): 6}


def test_missing_source_is_refused_by_name() -> None:
    half, whole = Box("model.norm.weight", (0,), (3,)), Box("model.norm.weight", (0,), (5,))
    with pytest.raises(
        ValueError, match=r"no elements for a part of model.norm.weight between the indices \(0,\) and \(5,\)"
    ):
        make_plan([(Piece(half, "a", 0, (1,)),)], [(Piece(whole, "b", 0, (1,)),)], itemsize=4, bucket_bytes=100)


def test_absent_source_is_refused_by_name() -> None:
    wanted = (Piece(Box("model.norm.weight", (0,), (5,)), "b", 0, (1,)),)
    with pytest.raises(ValueError, match=r"no elements for a part of model.norm.weight"):
        make_plan([()], [wanted], itemsize=4, bucket_bytes=100)


def test_other_rank_orders_are_tried_for_shared_ranks_only() -> None:
    model = small_shape()
    shared = ParallelConfig(tp=2, pp=2, dp=2, rollout_tp=4)
    orders = dict(list_rank_orders(model, shared))
    assert {(sizes.order, sizes.rank_permutation) for sizes in orders.values()} == {
        (RANK_ORDERS[1], (1, 1)),
        (RANK_ORDERS[0], (2, 2)),
    }
    assert not dict(list_rank_orders(model, dataclasses.replace(shared, rollout_ranks=4)))


def test_engines_of_their_own_are_on_other_nodes_than_trainers() -> None:
    separate = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, rollout_ranks=8)
    predicted = forecast(
        small_shape(), separate, ranks_per_node=2, engine_ranks_per_node=4, itemsize=4, bucket_bytes=1 << 20
    )
    received = predicted["reshard"]["received_bytes"]
    assert received["same_node"]["max"] == received["local"]["max"] == 0 < received["other_node"]["max"]
