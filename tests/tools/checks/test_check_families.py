"""The proofs of model families, at their smallest size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.rank_pool import RankPool
from tools.checks import families


def test_the_trainer_takes_the_experts_that_the_engine_chose(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Layers with a dense first one, experts chosen with a bias: an engine's numbers of layers could be others."""
    folder = tiny_model(family="glm4_moe", **families.SIZES | {"num_layers": 2})
    rows = {row["proof"]: row for row in families.prove_replay("glm4_moe", folder, ranks, tmp_path)}
    assert rows.keys() == {"replay", "replay, choices", "replay, others"} and all(row["met"] for row in rows.values())


def test_a_family_without_a_place_for_a_proof_is_named(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model(family="qwen3_5", num_layers=4)
    [critic] = families.prove_critic("qwen3_5", folder, ranks, tmp_path)
    [replay] = families.prove_replay("qwen3_5", folder, ranks, tmp_path)
    assert "use a text model, Qwen3_5ForCausalLM" in critic["layout"] and "no experts" in replay["layout"]
    assert "met" not in critic and "met" not in replay
