"""Megatron's layout joined with an engine's, proved on integers against shapes written out by hand."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model_shape import ModelShape
from megarl.parallel_layout import ParallelLayout
from megarl.weights.boxes import Box, Layout, Piece, contiguous_strides, find_overlap, subtract
from megarl.weights.families import FAMILIES, hf_tensors
from megarl.weights.layouts.megatron import megatron_layouts, parameter_shapes
from megarl.weights.plan import Plan, lower_bound_bytes, make_plan


def model_shape(family: str = "qwen3", **sizes: object) -> ModelShape:
    base = ModelShape(
        family=family, hidden_size=8, intermediate_size=16, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=4,
        vocab_size=37, tie_word_embeddings=False, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        norm_epsilon=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64, initializer_range=0.02,
    )  # fmt: skip
    return dataclasses.replace(base, **sizes)


def full_tensors(model: ModelShape) -> dict[str, np.ndarray]:
    """Every element of the model has a number of its own."""
    tensors, start = {}, 1
    for name, shape in hf_tensors(model).items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(start, start + count).reshape(shape)
        start += count
    return tensors


def engine_parameters(model: ModelShape, tensors: dict[str, np.ndarray], tp: int, rank: int) -> dict[str, np.ndarray]:
    """What one engine rank must hold, sliced from full tensors; -1 is padding."""
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
    for layer in (f"model.layers.{i}." for i in range(model.num_layers)):
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            q, k, v = (tensors[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows = slice(first_kv * width, (first_kv + kv_heads) * width)
            own = q[rank * heads * width : (rank + 1) * heads * width]
            held[f"{layer}self_attn.qkv_proj.{kind}"] = np.concatenate([own, k[rows], v[rows]])
        gate, up = (tensors[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        held[layer + "mlp.gate_up_proj.weight"] = np.concatenate([part(gate), part(up)])
        held[layer + "mlp.down_proj.weight"] = part(tensors[layer + "mlp.down_proj.weight"], 1)
        held[layer + "self_attn.o_proj.weight"] = part(tensors[layer + "self_attn.o_proj.weight"], 1)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if model.qk_norm else []
        held |= {f"{layer}{norm}.weight": tensors[f"{layer}{norm}.weight"] for norm in norms}
    return held


def layout_of(held: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> Layout:
    """The pieces of storages whose elements are numbered as `full_tensors` numbers them."""
    starts = {int(value.flat[0]): name for name, value in tensors.items()}
    pieces: list[Piece] = []
    for storage, value in held.items():
        strides = contiguous_strides(value.shape)
        heads = value.reshape(len(value), -1)[:, 0]
        breaks = [0, *(i for i in range(1, len(heads)) if not _adjacent(heads[i - 1], heads[i], tensors)), len(heads)]
        for low, high in pairwise(breaks):
            if heads[low] < 0:
                continue
            name = starts[max(s for s in starts if s <= heads[low])]
            corner = np.unravel_index(heads[low] - tensors[name].flat[0], tensors[name].shape)
            stop = tuple(int(c) + n for c, n in zip(corner, (high - low, *value.shape[1:]), strict=True))
            pieces.append(Piece(Box(name, tuple(map(int, corner)), stop), storage, low * strides[0], strides))
    return tuple(pieces)


def _adjacent(a: int, b: int, tensors: dict[str, np.ndarray]) -> bool:
    return any(
        t.flat[0] <= a and b <= t.flat[-1] and b - a == (t.shape[1] if t.ndim > 1 else 1) for t in tensors.values()
    )


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
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * flat.itemsize for s in strides])


def execute(plan: Plan, sources: list[dict[str, np.ndarray]], targets: list[dict[str, np.ndarray]]) -> None:
    """Carry a plan out on numpy storages, refusing to write an element twice."""
    for bucket in plan.buckets:
        for t in bucket:
            there = strided(
                sources[t.source_rank][t.source.storage].reshape(-1), t.source.offset, t.shape, t.source.strides
            )
            target = targets[t.destination_rank][t.destination.storage].reshape(-1)
            here = strided(target, t.destination.offset, t.shape, t.destination.strides)
            assert (here == -1).all(), f"{t.name} is written twice"
            here[...] = there


def reshard_case(model: ModelShape, tp: int, pp: int, dp: int, rollout_tp: int, bucket_bytes: int) -> Plan:
    """Fill Megatron's shards, run the plan, compare every engine rank with the slices; returns the plan."""
    parallel = ParallelLayout(tp=tp, pp=pp, dp=dp, rollout_tp=rollout_tp)
    padded = -(-model.vocab_size // (4 * tp)) * 4 * tp
    tensors = full_tensors(model)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
    ranks = range(parallel.world_size)
    shapes = [parameter_shapes(model, parallel, parallel.coordinates(r), padded_vocab_size=padded) for r in ranks]
    shards = [fill(layout, shape, tensors) for layout, shape in zip(layouts, shapes, strict=True)]
    expected = [engine_parameters(model, tensors, rollout_tp, r % rollout_tp) for r in ranks]
    wanted = [layout_of(held, tensors) for held in expected]
    plan = make_plan(layouts, wanted, itemsize=8, bucket_bytes=bucket_bytes, nodes=[r // 4 for r in ranks])
    live = [{name: np.full_like(value, -1) for name, value in held.items()} for held in expected]
    execute(plan, shards, live)
    for held, got in zip(expected, live, strict=True):
        for name, value in held.items():
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    received = [sum(r[link] for link in ("same_node", "other_node")) for r in plan.statistics()["received_bytes"]]
    assert received == lower_bound_bytes(layouts, wanted, 8)
    return plan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"),
    [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 1), (2, 2, 1, 2), (2, 1, 2, 4), (4, 2, 1, 2), (8, 1, 1, 8)],
)
def test_engines_get_every_element_once(family: str, tied: bool, tp: int, pp: int, dp: int, rollout_tp: int) -> None:
    model = model_shape(family, tie_word_embeddings=tied)
    reshard_case(model, tp, pp, dp, rollout_tp, bucket_bytes=1 << 20)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_and_layout(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 4])
    tp, pp, dp = data.draw(sizes), data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2]))
    rollout_tp = data.draw(st.sampled_from([n for n in (1, 2, 4) if tp * pp * dp % n == 0]))
    kv_heads = data.draw(sizes)
    widest = max(tp, rollout_tp, kv_heads)
    model = model_shape(
        data.draw(st.sampled_from(sorted(FAMILIES))),
        num_kv_heads=kv_heads,
        num_heads=widest * data.draw(st.sampled_from([1, 2, 3])),
        head_dim=data.draw(st.sampled_from([4, 8])),
        intermediate_size=widest * data.draw(st.integers(1, 5)),
        hidden_size=data.draw(st.integers(1, 9)),
        num_layers=pp * data.draw(st.integers(1, 2)),
        vocab_size=data.draw(st.integers(1, 200)),
        tie_word_embeddings=data.draw(st.booleans()),
    )
    bucket_bytes = data.draw(st.sampled_from([100, 3000, 1 << 20]))
    plan = reshard_case(model, tp, pp, dp, rollout_tp, bucket_bytes)
    largest_row = 8 * max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim) * tp * pp * dp
    assert max(plan.statistics()["staging_bytes"]) <= max(bucket_bytes, 2 * largest_row)


def test_query_groups_become_one_copy_each() -> None:
    plan = reshard_case(model_shape(num_kv_heads=4, num_layers=1), 1, 1, 1, 1, 1 << 20)
    copies = [t for bucket in plan.buckets for t in bucket if t.destination.storage.endswith("qkv_proj.weight")]
    assert [(t.name.rpartition("self_attn.")[2], t.shape) for t in copies] == [
        ("k_proj.weight", (4, 4, 8)),
        ("q_proj.weight", (4, 8, 8)),
        ("v_proj.weight", (4, 4, 8)),
    ]


def test_equal_layouts_move_nothing() -> None:
    for rollout_tp in (1, 2):
        plan = reshard_case(model_shape(vocab_size=64), rollout_tp, 1, 4, rollout_tp, 1 << 20)
        links = plan.statistics()["bytes"]
        assert links["same_node"] == links["other_node"] == 0 < links["local"]


def test_nearest_replica_and_balanced_senders() -> None:
    """Two nodes of two ranks hold the tensor twice; the third node takes from each of the four alike."""
    rows = tuple(Box("t", (i, 0), (i + 1, 10)) for i in range(8))
    holds = tuple(Piece(box, "s", 10 * i, (10, 1)) for i, box in enumerate(rows))
    sources = [holds, (), (), holds, (), ()]
    wants = [(), holds, holds, (), holds, holds]
    plan = make_plan(sources, wants, itemsize=2, bucket_bytes=1000, nodes=[0, 0, 1, 1, 2, 2])
    taken: dict[tuple[int, int], int] = {}
    for t in (t for bucket in plan.buckets for t in bucket):
        taken[t.source_rank, t.destination_rank] = taken.get((t.source_rank, t.destination_rank), 0) + t.numel
    assert taken == {(0, 1): 80, (3, 2): 80, (0, 4): 40, (3, 4): 40, (0, 5): 40, (3, 5): 40}


def test_plan_is_a_function_of_the_layouts_alone() -> None:
    digests = {reshard_case(model_shape(), 2, 2, 1, 2, 3000).digest() for _ in range(2)}
    other = reshard_case(model_shape(), 2, 2, 1, 4, 3000).digest()
    assert len(digests) == 1 and other not in digests


def test_sends_and_receives_of_a_pair_agree() -> None:
    plan = reshard_case(model_shape(), 2, 2, 1, 4, 2000)
    ranks = [plan.for_rank(rank) for rank in range(4)]
    assert len({len(rank.buckets) for rank in ranks}) == 1
    for index in range(len(plan.buckets)):
        for a in range(4):
            for b in range(4):
                sent = [t for t in ranks[a].buckets[index].sends if t.destination_rank == b]
                assert sent == [t for t in ranks[b].buckets[index].receives if t.source_rank == a]


def test_missing_source_is_refused_by_name() -> None:
    half, whole = Box("model.norm.weight", (0,), (3,)), Box("model.norm.weight", (0,), (5,))
    with pytest.raises(ValueError, match=r"model.norm.weight from \(3,\) to \(5,\)"):
        make_plan([(Piece(half, "a", 0, (1,)),)], [(Piece(whole, "b", 0, (1,)),)], itemsize=4, bucket_bytes=100)


def test_doubly_written_destination_is_refused() -> None:
    box = Box("t", (0, 0), (2, 3))
    pieces = (Piece(box, "a", 0, (5, 1)), Piece(box, "a", 2, (5, 1)))
    with pytest.raises(ValueError, match="same elements of a"):
        make_plan([pieces], [pieces], itemsize=4, bucket_bytes=100)


@pytest.mark.parametrize(
    ("offset", "overlaps"), [pytest.param(2, True, id="one column"), pytest.param(3, False, id="beside")]
)
def test_interleaved_columns_are_told_apart(offset: int, overlaps: bool) -> None:
    box = Box("t", (0, 0), (4, 3))
    assert (find_overlap([Piece(box, "a", 0, (6, 1)), Piece(box, "a", offset, (6, 1))]) is not None) is overlaps


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 5))] * 3), st.randoms(use_true_random=False))
def test_subtract_partitions(ranges: tuple[tuple[int, int], ...], random: object) -> None:
    whole = Box("t", tuple(a for a, _ in ranges), tuple(a + n for a, n in ranges))
    corner = tuple(random.randrange(a, b) for a, b in zip(whole.start, whole.stop, strict=True))
    part = Box("t", corner, tuple(random.randint(a + 1, b) for a, b in zip(corner, whole.stop, strict=True)))
    seen = np.zeros(whole.stop, int)
    for box in [part, *subtract(whole, part)]:
        seen[tuple(map(slice, box.start, box.stop))] += 1
    assert (seen[tuple(map(slice, whole.start, whole.stop))] == 1).all() and seen.sum() == whole.numel
