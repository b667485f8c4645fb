"""The default of trainer.logprob_chunk_tokens: its model of time against measured rows, its memory in every recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.families.logprob_chunks import (
    BLOCK_SHARE,
    LIMIT_BYTES,
    choose_chunk_tokens,
    head_seconds,
    logit_bytes,
    logprob_chunk_tokens,
)
from megarl.models.logprobs import vocabulary_blocks
from megarl.planner.defaults import with_chunk_tokens, with_memory_defaults
from megarl.planner.memory.devices import CPU, GPU, GPU_MEMORY_GIB, MARGIN_GIB
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.sizes import parallel_of
from megarl.types import ConfigError
from tests.planner.memory.conftest import RECIPES

MEASURED = Path(__file__).resolve().parents[3] / "tools/bench/results/h200.jsonl"
ON_GPUS = sorted(path.stem for path in RECIPES.glob("qwen3_*.yaml"))
TOKENS, HIDDEN, VOCABULARY, FLOPS = 32768, 2560, 151936, 783e12
"""Sizes of the measured rows, and the speed of a matrix product in the same run, which their shares are of."""


def test_the_model_of_time_has_the_measured_seconds() -> None:
    """Twelve rows on an H200: with kernels and without, chunks of 1,024 to 4,096 tokens. Six FLOPs a weight count."""
    lines = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if line["command"].startswith("vocab_parallel_logprobs")]
    assert len(rows) == 12
    for row in rows:
        chunk = int(row["case"].rpartition(" ")[2])
        columns = VOCABULARY * chunk // TOKENS // 64 * 64
        measured = 6 * TOKENS * HIDDEN * VOCABULARY / FLOPS / row["value"]
        has_kernels = "Triton" in row["case"]
        found = head_seconds(
            num_tokens=TOKENS,
            hidden_size=HIDDEN,
            vocabulary_rows=VOCABULARY,
            num_blocks=-(-VOCABULARY // columns),
            has_kernels=has_kernels,
        )
        assert found == pytest.approx(measured, rel=0.02 if has_kernels else 0.04), row["case"]


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_logits_of_a_recipe_stay_within_a_gib(large: Callable[..., Recipe], name: str) -> None:
    recipe = large(name)
    models = models_of(recipe, parallel_of(recipe))
    # Only the last pipeline stage has logits.
    phases = memory_table(recipe, models, GPU, stages=[models.policy.parallel.pp - 1]).phases
    taken = {phase.name: phase.use("logits").device_bytes for phase in phases if phase.use("logits").device_bytes}
    print(name, {phase: f"{size / 2**20:.0f} MiB" for phase, size in taken.items()})
    assert taken and max(taken.values()) <= LIMIT_BYTES == 2**30
    # The number is printed, and it is the one that was planned with.
    completed = with_chunk_tokens(recipe)
    parallel = models.policy.parallel
    assert completed.trainer.logprob_chunk_tokens == logprob_chunk_tokens(
        recipe, models.policy.shape, parallel, is_gpu=True
    )
    if recipe.trainer.logprob_chunk_tokens is not None:
        return
    # A row's head takes at most 2 % more time than with 1,024 tokens, the default before.
    tokens = recipe.trainer.max_tokens_per_microbatch // parallel.cp
    rows = VOCABULARY // parallel.tp

    def seconds(chunk: int) -> float:
        return head_seconds(
            num_tokens=tokens,
            hidden_size=models.policy.shape.hidden_size,
            vocabulary_rows=rows,
            num_blocks=-(-tokens // chunk),
            has_kernels=True,
        )

    assert seconds(completed.trainer.logprob_chunk_tokens or 0) <= (1 + BLOCK_SHARE) * seconds(min(tokens, 1024))


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [512, 18992, 37984, 151936, 262144])
@pytest.mark.parametrize("tokens", [1, 512, 8192, 40960, 1_000_000])
def test_any_sizes_stay_below_the_limit(tokens: int, rows: int, itemsize: int, has_kernels: bool) -> None:
    chunk = choose_chunk_tokens(
        num_tokens=tokens, hidden_size=4096, vocabulary_rows=rows, itemsize=itemsize, has_kernels=has_kernels
    )
    assert 1 <= chunk <= tokens
    assert chunk * rows * logit_bytes(itemsize, has_kernels=has_kernels) <= LIMIT_BYTES


@pytest.mark.parametrize("rows", [18992, 37984, 75968, 151936, 262144])
@pytest.mark.parametrize("tokens", [2048, 8192, 16384, 40960])
def test_without_a_limit_blocks_are_even_and_cost_little(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.families.logprob_chunks.LIMIT_BYTES", 1 << 60)
    chunk = choose_chunk_tokens(num_tokens=tokens, hidden_size=4096, vocabulary_rows=rows, itemsize=2, has_kernels=True)
    blocks = [len(block) for block in vocabulary_blocks(tokens, rows, chunk)]
    # Sizes are multiples of 64, so the last block is smaller by at most 64 for each block.
    assert max(blocks) - min(blocks) <= 64 * len(blocks)
    seconds = [
        head_seconds(num_tokens=tokens, hidden_size=4096, vocabulary_rows=rows, num_blocks=count, has_kernels=True)
        for count in (0, len(blocks))
    ]
    assert len(blocks) == 1 or seconds[1] <= (1 + BLOCK_SHARE) * seconds[0]


def test_ranks_on_cpus_keep_their_chunk(large: Callable[..., Recipe]) -> None:
    recipe = large("tiny_rl", "model.path=models/tiny")
    models = models_of(recipe, parallel_of(recipe))
    assert logprob_chunk_tokens(recipe, models.policy.shape, models.policy.parallel, is_gpu=False) == 1024
    tokens = min(1024, recipe.trainer.max_tokens_per_microbatch)
    train = next(phase for phase in memory_table(recipe, models, CPU).phases if phase.name == "train")
    assert train.use("logits").host_bytes == tokens * 512 * (4 + 2 * 4)


def test_a_given_number_and_a_loop_without_log_probs_are_left(large: Callable[..., Recipe]) -> None:
    own = large("qwen3_14b_dapo_h200", "trainer.logprob_chunk_tokens=77")
    assert with_chunk_tokens(own).trainer.logprob_chunk_tokens == 77
    scored = large("tiny_reward_model", "model.path=models/tiny")
    assert with_chunk_tokens(scored).trainer.logprob_chunk_tokens is None


def test_the_chosen_number_is_printed_and_read_back(
    large: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large("qwen3_14b_dapo_h200")
    main_output = _printed(capsys, ["show-config", str(RECIPES / "qwen3_14b_dapo_h200.yaml")])
    (tmp_path / "printed.yaml").write_text(main_output)
    chosen = load(tmp_path / "printed.yaml").trainer.logprob_chunk_tokens
    assert chosen is not None and 1024 < chosen < 27648
    planned = _printed(capsys, ["plan", str(RECIPES / "qwen3_14b_dapo_h200.yaml")])
    assert f"trainer.logprob_chunk_tokens = {chosen} by default" in planned


def _printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    return capsys.readouterr().out


def test_a_row_far_too_long_gets_the_chunk_of_the_limit() -> None:
    """Blocks of 64 rows are the smallest, and this row's logits do not fit even then."""
    chunk = choose_chunk_tokens(
        num_tokens=1_700_000, hidden_size=2560, vocabulary_rows=151_936, itemsize=2, has_kernels=False
    )
    assert chunk == LIMIT_BYTES // (151_936 * logit_bytes(2, has_kernels=False))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(("cluster.gpu_memory_gib=h200",), True, id="fits"),
        pytest.param(("cluster.gpu_memory_gib=h200", "trainer.keep_logits=false"), False, id="switched off"),
        pytest.param(
            ("cluster.gpu_memory_gib=40", "trainer.recompute=none", "trainer.offload=[]"), None, id="too full"
        ),
    ],
)
def test_logits_are_kept_where_an_update_leaves_8_gib(
    large: Callable[..., Recipe], overrides: tuple[str, ...], expected: bool | None
) -> None:
    # A given cache: its default would be the rest of the GPU.
    recipe = with_memory_defaults(large("qwen3_1_7b_gsm8k", "rollout.kv_cache_gib=20", *overrides))
    assert recipe.trainer.keep_logits is expected
    models = models_of(recipe, parallel_of(recipe))
    phases = {phase.name: phase for phase in memory_table(recipe, models, GPU).phases}
    tokens = recipe.trainer.max_tokens_per_microbatch
    chunk = logprob_chunk_tokens(recipe, models.policy.shape, models.policy.parallel, is_gpu=True)
    counted = tokens if expected else min(tokens, chunk)
    assert phases["train"].use("logits").device_bytes == counted * VOCABULARY * 2
    if expected is None:
        return
    limit = (GPU_MEMORY_GIB["h200"] - MARGIN_GIB) * 2**30
    assert phases["train"].device_bytes <= limit


def test_kept_logits_of_torch_operations_have_float32_copies_of_a_chunk_only(large: Callable[..., Recipe]) -> None:
    overrides = ("trainer.keep_logits=true", "trainer.logprob_chunk_tokens=100", "rollout.sampling.top_p=0.9")
    recipe = large("qwen3_1_7b_gsm8k", *overrides)
    models = models_of(recipe, parallel_of(recipe))
    (train,) = (phase for phase in memory_table(recipe, models, GPU).phases if phase.name == "train")
    tokens = recipe.trainer.max_tokens_per_microbatch
    assert train.use("logits").device_bytes == (2 * tokens + 8 * 100) * VOCABULARY


def test_exact_log_probs_keep_no_logits(large: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.keep_logits"):
        large("tiny_rl", "model.path=models/tiny", "trainer.exact=true", "trainer.keep_logits=true")
