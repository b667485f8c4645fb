"""The memory table against numbers that were computed by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.planner.memory import trainer_bytes
from megarl.planner.memory.activations import layer_bytes, rows_in_flight
from megarl.planner.memory.devices import CPU, GPU, PINNED_BLOCK_BYTES
from megarl.planner.memory.memory_table import CacheCapacity, MemoryTable
from megarl.planner.memory.phases import memory_table
from megarl.planner.memory.rank_memory import RankMemory
from megarl.planner.memory.trainer_bytes import Parameter, TrainerStates
from megarl.planner.predictions import models_of
from megarl.planner.search import with_field_values
from megarl.planner.sizes import parallel_of
from tests.planner.memory.conftest import RECIPES

GB = 1e9
AS_ON_THE_PAGE = (
    "trainer.offload=[optimizer]",
    "trainer.max_tokens_per_microbatch=24576",
    "rollout.kv_cache_gib=48",
)


def table_of(recipe: Recipe, gib: float | None = None) -> MemoryTable:
    return memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU, gpu_gib=gib)


def test_14b_on_eight_gpus_takes_what_was_computed_by_hand(large: Callable[..., Recipe]) -> None:
    """Qwen3-14B, tp 4, dp 2, engines of tp 2, GB a GPU: 14.77e9 weights in bf16, float32 gradients, Adam over dp.

    Of 24,576 tokens 40 layers keep 48 GB, SwiGLU in one kernel. A save stages each rank's part in host memory, 1.85e9
    weights and 12 bytes for each, which takes nothing of the GPU.
    """
    table = table_of(large("qwen3_14b_four_way", *AS_ON_THE_PAGE))
    phases = {phase.name: phase for phase in table.phases}
    by_hand = {
        "rollout": {"parameters": 7.4, "gradients": 14.8, "engine weights": 14.8, "KV cache": 51.5, "moments": 0},
        "reshard": {"parameters": 7.4, "gradients": 14.8, "engine weights": 14.8, "KV cache": 0, "moments": 0},
        "train": {"parameters": 7.4, "gradients": 14.8, "main weights": 7.4, "moments": 14.8, "activations": 48.0},
        "save": {"parameters": 7.4, "gradients": 14.8, "main weights": 7.4, "moments": 14.8, "checkpoint": 0},
    }
    for name, kinds in by_hand.items():
        for kind, size in kinds.items():
            assert phases[name].use(kind).device_bytes / GB == pytest.approx(size, rel=0.05), (name, kind)
    # Communicators: three of four and more ranks (688 MiB), two of pairs (544), and one peer of the reshard (384).
    nccl = (3 * 688 + 2 * 544 + 384) * 2**20
    # Graphs: 51 sizes up to 512 tokens, and 35 up to 256, for 40 layers.
    by_library = {"CUDA": 2.7, "NCCL": nccl / GB, "CUDA graphs": (51 + 35) * 40 * 0.4 * 2**20 / GB}
    for kind, size in by_library.items():
        assert phases["train"].use(kind).device_bytes / GB == pytest.approx(size, rel=1e-3), kind
    # Of the activations, the logits and the backward pass 2.6 % stay unused.
    assert phases["train"].use("fragmentation").device_bytes / GB == pytest.approx(0.026 * 50.2, rel=0.03)
    sums = {"rollout": 99.8, "reshard": 45.2, "train": 102.1, "save": 52.2}
    for name, size in sums.items():
        assert phases[name].device_bytes / GB == pytest.approx(size, rel=0.05), name
    staged = phases["save"].use("checkpoint").host_bytes
    assert staged % PINNED_BLOCK_BYTES == 0
    assert staged / GB == pytest.approx(1.846 * (2 + 12), abs=PINNED_BLOCK_BYTES / GB)
    # The engine sleeps while the trainer is built: the start takes no more than a rollout.
    assert phases["start"].device_bytes == phases["rollout"].device_bytes


def test_an_activation_in_steps_keeps_two_more_copies(large: Callable[..., Recipe]) -> None:
    """Megatron's own SwiGLU keeps the activated gate, and up with its offset added: 17,408 channels of bf16 each."""
    steps = large("qwen3_14b_four_way", *AS_ON_THE_PAGE, "trainer.megatron.bias_activation_fusion=false")
    tables = table_of(large("qwen3_14b_four_way", *AS_ON_THE_PAGE)), table_of(steps)
    fused, unfused = (next(p for p in table.phases if p.name == "train").use("activations") for table in tables)
    assert unfused.device_bytes - fused.device_bytes == pytest.approx(40 * 24576 * 2 * 17408 // 4 * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "module", "channels"),
    [
        # Of each layer: its norm is inside the linear layer behind it, so that nothing of a norm is left to save.
        ("qwen3_14b_four_way", "layernorm", 0),
        # The norm's output, gate, up and product, of channels split four ways; the norm's statistics are 4 bytes.
        ("qwen3_14b_four_way", "mlp", 5120 // 4 + 2 / 4 + 3 * 17408 // 4),
        # Eight experts a token, a quarter more on the fullest rank: the product of 768 channels.
        ("qwen3_30b_a3b_gspo", "moe_act", 8 * 1.25 * 768),
        ("qwen3_30b_a3b_gspo", "moe", 8 * 1.25 * (2048 + 3 * 768) + 3 * 128 * 2 + 4 * 8 * 4),
    ],
)
def test_modules_that_are_computed_anew(large: Callable[..., Recipe], name: str, module: str, channels: float) -> None:
    """Numbers of bf16 a token and layer that are not saved, by hand."""
    recipe = large(name, "trainer.recompute=none", "trainer.router_replay=false")
    fields = {"trainer.recompute": "selective", "trainer.recompute_modules": (module,)}
    models = models_of(recipe, parallel_of(recipe))
    shape, parallel = models.policy.shape, models.policy.parallel
    bytes_of_layer = [
        layer_bytes(shape, parallel, RankMemory(other, models, GPU, 0).pass_settings(models.policy), shape.layers[0])
        for other in (recipe, with_field_values(recipe, fields))
    ]
    tokens = recipe.trainer.max_tokens_per_microbatch // parallel.cp
    split = 1 if not shape.num_experts else parallel.tp
    assert bytes_of_layer[0] - bytes_of_layer[1] == pytest.approx(tokens / split * 2 * channels, rel=1e-6, abs=1)


def test_shards_of_a_buffer() -> None:
    """Last parameter first, each at a multiple of 64 elements; 164 elements are padded to 256, half for each rank."""
    parameters = [Parameter(100, num_moments=2), Parameter(30, num_moments=2)]
    states = [
        trainer_bytes._buffer_states(
            parameters, num_shards=2, shard=shard, itemsize=2, is_distributed=True, is_pinned=True
        )
        for shard in (0, 1)
    ]
    assert [state.parameters for state in states] == [512, 512]
    assert [state.gradients for state in states] == [1024, 1024]
    # The first shard has 30 elements of the last parameter, and 64 of the first; the second the other 36.
    assert [state.main_weights for state in states] == [4 * 94, 4 * 36]
    assert [state.moments for state in states] == [8 * 94, 8 * 36]
    # Half of 130 weights, and of its own elements main weights and moments.
    assert [state.saved for state in states] == [130 + 12 * 94, 130 + 12 * 36]
    assert [state.offloaded_bytes(["optimizer"]) for state in states] == [12 * 94, 12 * 36]
    assert states[0].offloaded_bytes(["parameters", "gradients"]) == 512
    whole = trainer_bytes._buffer_states(
        [Parameter(100), Parameter(30)], num_shards=2, shard=0, itemsize=2, is_distributed=False, is_pinned=False
    )
    assert whole == TrainerStates(parameters=260, gradients=520, main_weights=520, saved=390)


def test_matrices_have_one_moment() -> None:
    """Muon's momentum; the vector of 30 elements has Adam's two moments."""
    parameters = [Parameter(100, num_moments=1), Parameter(30, num_moments=2)]
    first, second = (
        trainer_bytes._buffer_states(
            parameters, num_shards=2, shard=shard, itemsize=2, is_distributed=True, is_pinned=True
        )
        for shard in (0, 1)
    )
    assert (first.moments, second.moments) == (4 * (64 + 2 * 30), 4 * 36)
    assert (first.saved, second.saved) == (130 + 4 * 94 + first.moments, 130 + 4 * 36 + second.moments)
    whole = trainer_bytes._buffer_states(
        parameters, num_shards=1, shard=0, itemsize=4, is_distributed=False, is_pinned=False
    )
    assert whole.moments == 4 * (100 + 60) and whole.saved == 4 * 130 + whole.moments


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    buckets = trainer_bytes._make_buckets([Parameter(10, has_own_bucket=True), Parameter(200), Parameter(5)], 4)
    assert [(bucket.start, bucket.stop) for bucket in buckets] == [(0, 384), (384, 512)]
    assert buckets[0].parameters == ((0, 5), (64, 264)) and buckets[1].parameters == ((384, 394),)


@pytest.mark.parametrize(
    ("pp", "vpp", "rows"),
    [(1, 1, [1]), (4, 1, [4, 3, 2, 1]), (2, 2, [2.5, 1.5]), (4, 2, [5.5, 4.5, 3.5, 2.5])],
)
def test_rows_in_flight(pp: int, vpp: int, rows: list[float]) -> None:
    """One forward, one backward: a stage has as many as stages follow; interleaved (pp - 1) / vpp more at the first."""
    parallel = ParallelConfig(tp=1, pp=pp, dp=1, rollout_tp=1, vpp=vpp)
    assert [rows_in_flight(parallel, stage) for stage in range(pp)] == rows


def test_requests_that_fit_in_a_cache() -> None:
    room = CacheCapacity(tokens=629_120, longest=18_432, max_concurrent_requests=256, decoding_requests=256)
    assert room.longest_requests == 34 and room.mean_length == 2457
    assert "34 requests of the maximum length of 18,432" in str(room) and "mean length of 2,457 tokens" in str(room)
    assert "always fit" in str(
        CacheCapacity(tokens=1000, longest=100, max_concurrent_requests=10, decoding_requests=10)
    )


def test_a_share_of_the_gpu_leaves_what_is_left_to_the_cache(large: Callable[..., Recipe]) -> None:
    """The engine's weights, a step, graphs, CUDA and one communicator take a part of 0.6 * 139.8 GiB."""
    own = table_of(large("qwen3_14b_four_way"), 139.8)
    share = table_of(with_field_values(large("qwen3_14b_four_way"), {"rollout.gpu_memory_utilization": 0.6}), 139.8)
    rollout = next(phase for phase in share.phases if phase.name == "rollout")
    others = sum(rollout.use(kind).device_bytes for kind in ("engine weights", "engine step", "CUDA graphs", "CUDA"))
    cache = 0.6 * 139.8 * 2**30 - others - 544 * 2**20
    assert rollout.use("KV cache").device_bytes == pytest.approx(cache, rel=1e-3)
    assert own.cache is not None and share.cache is not None and share.cache.tokens < own.cache.tokens


def test_on_a_cpu_all_is_the_hosts(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_four_way")
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), CPU)
    assert all(phase.device_bytes == 0 for phase in table.phases)
    train = next(phase for phase in table.phases if phase.name == "train")
    # The engine does not sleep there.
    assert train.use("engine weights").host_bytes > 14e9 and train.use("KV cache").host_bytes > 100e9
    assert table.bytes_by_metric()["train"] == train.host_bytes


def test_the_largest_table_takes_no_torch_and_no_second(large: Callable[..., Recipe], tmp_path: Path) -> None:
    large("qwen3_235b_a22b_gspo")
    program = (
        "import sys, time; from megarl.config.recipe import load; from megarl.preflight import check_plan; "
        "from megarl.planner.predictions import table_of; from megarl.console.predictions import print_memory; "
        "recipe = load(sys.argv[1]); began = time.process_time(); "
        "print_memory(recipe, table_of(recipe, check_plan(recipe)[1])); "
        "print('took', time.process_time() - began, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(RECIPES / "qwen3_235b_a22b_gspo.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, took = done.stdout.splitlines()
    _, seconds, has_torch = took.split()
    assert float(seconds) < 1.0 and has_torch == "False"
    assert "host memory of a node" in done.stdout


SEPARATE = ("rollout.placement=separate", "cluster.ranks_per_node=16", "rollout.ranks=8", "trainer.offload=[]")


def test_ranks_that_train_and_ranks_that_sample(large: Callable[..., Recipe]) -> None:
    """Each has all of its own, and nothing of the other: a trainer no engine, an engine no weights but its own."""
    table = table_of(large("qwen3_14b_four_way", *SEPARATE))
    phases = {phase.name: phase for phase in table.phases}
    parts = {name: (phase.part, phase.rank) for name, phase in phases.items()}
    trainer_rank, engine_rank = ("trainer", 0), ("engine", 8)
    assert parts == {
        "start": trainer_rank, "reshard": trainer_rank, "logprobs": trainer_rank, "train": trainer_rank,
        "save": trainer_rank, "start engine": engine_rank, "rollout": engine_rank, "reshard engine": engine_rank,
    }  # fmt: skip
    states, sampled = ("parameters", "gradients", "main weights", "moments"), ("engine weights", "KV cache")
    for phase in table.phases:
        has = [kind for kind in (*states, *sampled) if phase.use(kind).device_bytes]
        assert has == list(sampled if phase.part == "engine" else states if phase.name != "start" else states[:3])
    colocated = {phase.name: phase for phase in table_of(large("qwen3_14b_four_way", "trainer.offload=[]")).phases}
    # It never sleeps, and never offloads.
    rollout, reshard = phases["rollout"], phases["reshard engine"]
    assert rollout.use("engine weights") == colocated["rollout"].use("engine weights")
    assert reshard.use("KV cache") == rollout.use("KV cache") and reshard.use("staging").device_bytes > 0
    assert phases["reshard"].use("moments") == phases["train"].use("moments") == colocated["train"].use("moments")
    offloaded = table_of(large("qwen3_14b_four_way", *SEPARATE, "trainer.offload=[optimizer,gradients,parameters]"))
    assert offloaded == table
    # A phase that both have is predicted at its fullest rank.
    assert table.bytes_by_metric()["reshard"] == max(phases["reshard"].device_bytes, reshard.device_bytes)
    assert table.bytes_by_metric()["rollout"] == rollout.device_bytes
    trains, samples = table.fullest_host
    assert (trains.part, samples.part) == ("trainer", "engine")
    assert table.host_bytes(num_trainers=3, num_engines=2) == 3 * trains.host_bytes + 2 * samples.host_bytes


def test_a_copy_of_the_weights_is_sent_beside_every_phase_of_the_trainer(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_four_way", *SEPARATE)
    tables = [table_of(with_field_values(recipe, {"weights.overlap": flag})) for flag in (False, True)]
    without, beside = ({phase.name: phase for phase in table.phases} for table in tables)
    # 14.77e9 weights in bf16 over tp 4, and two buckets of 256 MiB.
    copy, buckets = 14.77e9 * 2 / 4, 2 * 256 * 2**20
    for name, phase in beside.items():
        more = phase.device_bytes - without[name].device_bytes
        expected = 0 if phase.part == "engine" else copy + buckets * (name in ("logprobs", "train", "save"))
        assert more == pytest.approx(expected, rel=0.01), name


def test_a_tiny_run_with_separate_engines(large: Callable[..., Recipe]) -> None:
    """On CPUs, three ranks that train beside an engine of two, whose number the others' is no multiple of."""
    sizes = ("cluster.ranks_per_node=5", "rollout.ranks=2", "rollout.tp=2", "trainer.tp=1", "trainer.pp=1")
    recipe = large("tiny_rl", "model.path=models/tiny", "rollout.placement=separate", *sizes)
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), CPU)
    assert {phase.place for phase in table.phases} == {"trainer rank 0", "engine rank 3"}
    rollout = next(phase for phase in table.phases if phase.name == "rollout")
    assert table.cache is not None and table.cache.longest_requests > 0
    assert rollout.use("parameters").host_bytes == 0 and rollout.use("engine weights").host_bytes > 0
    assert table.as_json()["phases"][0]["part"] == "trainer"
