"""Rules of parameters: which dimension is split, which blocks a parameter has, in closed form."""

from __future__ import annotations

import pytest

from megarl.families.tensors.rules import (
    Segment,
    column,
    gate_up,
    query_groups,
    replicate,
    row,
    vocabulary,
    with_experts,
)
from tests.shapes import small_shape


def test_a_column_is_split_over_its_outputs_and_a_row_over_its_inputs() -> None:
    outputs, inputs = column("p", "w", (6, 4)), row("p", "w", (6, 4))
    assert (outputs.dim, outputs.blocks) == (0, ((Segment("w", 0, 6),),))
    assert (inputs.dim, inputs.blocks) == (1, ((Segment("w", 0, 4),),))
    assert outputs.tensors == inputs.tensors == (("w", (6, 4)),)
    assert not outputs.padded and not inputs.padded


def test_a_vocabulary_is_split_over_its_padded_rows() -> None:
    rule = vocabulary("p", "w", small_shape(), "first_stage")
    assert (rule.dim, rule.padded, rule.place) == (0, True, "first_stage")
    assert (rule.tensors, rule.blocks) == ((("w", (37, 8)),), ((Segment("w", 0, 37),),))


def test_a_replicated_parameter_is_not_split() -> None:
    rule = replicate("p", "w", (6,))
    assert (rule.dim, rule.padded, rule.blocks) == (None, False, ((Segment("w", 0, 6),),))


def test_gate_and_up_are_blocks_split_over_their_outputs() -> None:
    rule = gate_up("p", "gate", "up", (6, 4))
    assert (rule.dim, rule.blocks) == (0, ((Segment("gate", 0, 6),), (Segment("up", 0, 6),)))
    assert rule.tensors == (("gate", (6, 4)), ("up", (6, 4)))


@pytest.mark.parametrize("features", [(8,), ()], ids=["weight", "bias"])
def test_query_groups_are_one_block_split_over_its_rows(features: tuple[int, ...]) -> None:
    # Four query heads and two key-value heads, three wide.
    rule = query_groups("p", "q", "k", "v", small_shape(num_heads=4, num_kv_heads=2, head_dim=3), features)
    block = (
        Segment("q", 0, 6), Segment("k", 0, 3), Segment("v", 0, 3), Segment("q", 6, 12), Segment("k", 3, 6),
        Segment("v", 3, 6),
    )  # fmt: skip
    assert (rule.dim, rule.blocks) == (0, (block,))
    assert rule.tensors == (("q", (12, *features)), ("k", (6, *features)), ("v", (6, *features)))


def test_gates_of_query_heads_follow_the_heads_of_their_group() -> None:
    model = small_shape("qwen3_next", num_heads=2, num_kv_heads=1, head_dim=3)
    rule = query_groups("p", "q", "k", "v", model, (8,))
    # In the checkpoint each head has three rows, then its gate three.
    queries, gates = (Segment("q", 0, 3), Segment("q", 6, 9)), (Segment("q", 3, 6), Segment("q", 9, 12))
    assert rule.blocks == ((*queries, *gates, Segment("k", 0, 3), Segment("v", 0, 3)),)
    assert rule.tensors[0] == ("q", (12, 8))


def test_experts_split_as_dense_feed_forward_layers_do() -> None:
    model = small_shape("qwen3_moe")
    norm = replicate("decoder.layers.{layer}.pre_mlp_layernorm.weight", "n", (8,))
    rules = {rule.parameter.rpartition("mlp.")[2]: rule for rule in with_experts((norm,), model)}
    experts = {name: rule for name, rule in rules.items() if rule.is_expert}
    assert {name: (rule.dim, rule.tensors[0][1]) for name, rule in experts.items()} == {
        "experts.local_experts.{expert}.linear_fc1.weight": (0, (8, 8)),
        "experts.local_experts.{expert}.linear_fc2.weight": (1, (8, 8)),
    }
    assert (rules["router.weight"].dim, rules["router.weight"].is_expert) == (None, False)
