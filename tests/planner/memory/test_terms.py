"""Terms of the plan: communicators, graphs, the explanation of each, and the memory measured on a GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import Recipe
from megarl.config.libraries.library_settings import balance_losses
from megarl.config.parallel import ParallelConfig
from megarl.planner.memory.communicators import list_communicators
from megarl.planner.memory.devices import GPU
from megarl.planner.memory.engine_bytes import graph_bytes
from megarl.planner.memory.node_bytes import DRIVER_BYTES, fullest_node_bytes, node_terms
from megarl.planner.memory.phases import memory_table
from megarl.planner.memory.rank_memory import RankMemory
from megarl.planner.memory.terms import TERMS, explain_terms
from megarl.planner.predictions import models_of
from megarl.planner.sizes import parallel_of
from tests.planner.memory.conftest import RECIPES

GIB, MIB = 2**30, 2**20
MEASURED = Path(__file__).resolve().parents[3] / "tools/bench/results/h200.jsonl"
PACKAGE = Path(__file__).resolve().parents[3] / "megarl"
LARGE = sorted(path.stem for path in RECIPES.glob("qwen3_*.yaml"))


def sizes(parallel: ParallelConfig, ranks_per_node: int = 8, **kind: Any) -> dict[str, int]:
    given: Any = {"has_trainer": True, "has_engine": True, "has_experts": False, **kind}
    return {one.name: one.num_bytes // MIB for one in list_communicators(parallel, ranks_per_node, **given)}


def test_a_rank_alone_has_no_communicator() -> None:
    assert sizes(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)) == {}


def test_communicators_of_a_dense_model() -> None:
    assert sizes(ParallelConfig(tp=4, pp=1, dp=2, rollout_tp=2)) == {
        "tensor parallelism": 688,
        "data and context parallelism": 544,
        "all trainers": 688,
        "gradient norm": 688,
        "engine's tensor parallelism": 544,
        # Half of an engine rank's weights come from one other trainer: 32 channels of 12 MiB.
        "reshard": 384,
    }
    # Weights that stay where they are need no sends; stages do, to both neighbours.
    assert "reshard" not in sizes(ParallelConfig(tp=4, pp=1, dp=2, rollout_tp=4))
    assert sizes(ParallelConfig(tp=1, pp=4, dp=2, rollout_tp=1))["pipeline parallelism"] == 2 * 384


def test_communicators_of_experts_and_of_several_nodes() -> None:
    """An all-to-all connects each peer of the node: eight H100 took 3.28 GB for it, by NVIDIA/nccl issue 1685."""
    near = sizes(ParallelConfig(tp=1, pp=1, dp=8, ep=8, rollout_tp=1), has_experts=True)
    taken = near["expert parallelism"] * MIB
    assert taken == 7 * 384 * MIB and taken == pytest.approx(3.28e9, rel=0.15)
    # Between nodes each peer has two channels, and all share one buffer.
    far = sizes(ParallelConfig(tp=1, pp=1, dp=16, ep=16, rollout_tp=1), has_experts=True)
    assert far["expert parallelism"] == 7 * 24 + 512 and far["reshard"] == 7 * 24 + 512
    stages = sizes(ParallelConfig(tp=8, pp=2, dp=1, rollout_tp=8))
    assert stages["pipeline parallelism"] == 512


def test_communicators_of_the_gradient_norm_the_embedding_and_balanced_experts() -> None:
    parallel = ParallelConfig(tp=2, pp=2, dp=2, rollout_tp=2, ep=2)
    parts = {"tensor and pipeline parallelism": 688, "experts and pipeline parallelism": 688}
    whole = sizes(parallel, has_experts=True, is_distributed=False)
    assert whole.items() >= parts.items() and "gradient norm" not in whole
    further = {"embedding": 544, "data parallelism": 544, "gradient norm": 688}
    found = sizes(parallel, has_experts=True, shares_embedding=True, balance_losses={"z_loss"})
    assert found.items() >= further.items() and not found.keys() & parts.keys()
    assert not sizes(parallel, has_experts=True).keys() & {"embedding", "data parallelism"}


@pytest.mark.parametrize(
    ("settings", "sum_of_counts"),
    [
        ({"moe_aux_loss_coeff": 1e-3}, {"tensor, data and context parallelism": 688}),
        (
            {"moe_aux_loss_coeff": [1e-3], "moe_router_load_balancing_type": ["seq_aux_loss"]},
            {"tensor and context parallelism": 544},
        ),
        ({"moe_z_loss_coeff": 1e-3}, {}),
        ({"moe_aux_loss_coeff": [0.0, 0.0], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, None),
    ],
)
def test_each_balancing_loss_has_its_groups(settings: dict[str, Any], sum_of_counts: dict[str, int] | None) -> None:
    """The loss of sequences adds up counts over ranks with parts of a sequence, the others over all with the layer."""
    parallel = ParallelConfig(tp=2, pp=2, dp=2, rollout_tp=2, ep=2)
    alone, found = (
        sizes(parallel, has_experts=True, balance_losses=losses) for losses in ((), balance_losses(settings))
    )
    expected = {} if sum_of_counts is None else {"data parallelism": 544} | sum_of_counts
    assert found == alone | expected


@pytest.mark.parametrize(("tied", "stage", "has_group"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_stages_with_a_copy_of_the_embedding_have_a_group(
    large: Callable[..., Recipe], tied: bool, stage: int, has_group: bool
) -> None:
    recipe = large("qwen3_14b_dapo_h200", "trainer.tp=1", "trainer.pp=4")
    models = models_of(recipe, parallel_of(recipe))
    shape = dataclasses.replace(models.policy.shape, tie_word_embeddings=tied)
    models = dataclasses.replace(models, policy=dataclasses.replace(models.policy, shape=shape))
    memory = RankMemory(recipe, models, GPU, models.policy.parallel.rank(tp=0, dp=0, pp=stage))
    assert ("embedding" in {one.name for one in memory.communicators}) == has_group


def test_every_rank_of_a_gpu_wastes_a_share_of_its_temporary_memory(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_dapo_h200", "cluster.nodes=2", "rollout.placement=separate", "rollout.ranks=8")
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU)
    phases = {phase.name: phase for phase in table.phases}
    step = phases["rollout"].use("engine step").device_bytes
    assert phases["rollout"].use("fragmentation").device_bytes == int(0.026 * step) > 0
    assert phases["train"].use("fragmentation").device_bytes > 0


def test_a_rank_that_only_samples_has_the_engines_groups() -> None:
    parallel = ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2, rollout_ranks=4)
    assert sizes(parallel, has_trainer=False) == {
        "engine's tensor parallelism": 544,
        "engine's world": 544,
        "reshard": 384,
    }


@pytest.mark.parametrize(("requests", "graphs"), [(256, 51 + 35), (512, 51 + 51), (16, 7 + 5), (1, 2 + 1)])
def test_graphs_by_requests(requests: int, graphs: int) -> None:
    """vLLM logs `PIECEWISE=51 (largest=512), FULL=35 (largest=256)` for 256 requests."""
    model: Any = SimpleNamespace(num_layers=10)
    assert graph_bytes(model, max_requests=requests) == pytest.approx(graphs * 10 * 0.4 * MIB, rel=1e-5)


@pytest.mark.parametrize("name", LARGE)
def test_every_use_of_memory_has_its_term(large: Callable[..., Recipe], name: str) -> None:
    recipe = large(name)
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU)
    kinds = {term.kind for term in explain_terms(table)}
    assert kinds - TERMS.keys() <= {"reference", "reward_model", "teacher0"}
    assert kinds >= {"CUDA", "fragmentation", "libraries"}
    parts = node_terms(recipe, table)
    assert sum(parts.values()) == fullest_node_bytes(recipe, table) + DRIVER_BYTES


def test_every_term_is_a_use_of_the_planner() -> None:
    sources = "".join(path.read_text() for path in Path(memory_table.__code__.co_filename).parent.glob("[!t]*.py"))
    assert [kind for kind in TERMS if f'"{kind}"' not in sources] == []


def test_the_plan_explains_each_term(large: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    large("qwen3_14b_dapo_h200")
    path = str(RECIPES / "qwen3_14b_dapo_h200.yaml")
    printed = _printed(capsys, ["plan", path, "--explain"])
    assert "NCCL: at most 3.61 GiB = communicators: " in printed and "NVIDIA/nccl issues" in printed
    assert "host memory of the fullest node in GiB: 8 ranks in save " in printed and " + driver 1.4" in printed
    found = json.loads(_printed(capsys, ["plan", path, "--json", "--explain"]))
    assert {"kind", "device_bytes", "host_bytes", "formula", "source"} == found["terms"][0].keys()
    assert len(found["terms"]) == printed.count(" (source: ")


def _printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_the_memory_measured_on_an_h200_is_predicted(large: Callable[..., Recipe], phase: str) -> None:
    """GRPO with Qwen3-1.7B on one GPU, the last step of four: all memory in use. One constant, CUDA's, is fitted to
    these two numbers, so they are no proof of it. The run had chunks of 1,024 tokens.
    """
    large("qwen3_1_7b_gsm8k")
    lines = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "memory" in line and "grpo_gpu.py --shape qwen3-1.7b" in line["command"]]
    measured = steps[-1]["memory"][phase]["measured_gib"]
    # tools/bench/grpo_gpu.py, recipe_of.
    recipe = Recipe.model_validate(
        {
            "name": "measured",
            "loop": "rl",
            "model": {"path": "models/Qwen3-1.7B", "dtype": "bfloat16"},
            "data": {"train": "unused", "max_prompt_tokens": 256},
            "trainer": {
                "max_tokens_per_microbatch": 16384,
                "logprob_chunk_tokens": 1024,
                "recompute": "full",
                "offload": ["optimizer", "gradients"],
            },
            "rollout": {"kv_cache_gib": 24.0, "max_concurrent_requests": 256, "sampling": {"max_new_tokens": 2048}},
        }
    )
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU)
    assert table.bytes_by_metric()[phase] / GIB == pytest.approx(measured, rel=0.01)


def test_the_sources_of_terms_exist() -> None:
    sources = {term.source for term in TERMS.values() if term.source.endswith(".py")}
    assert "models/logprobs.py" in sources
    assert [source for source in sources if not (PACKAGE / source).is_file()] == []
