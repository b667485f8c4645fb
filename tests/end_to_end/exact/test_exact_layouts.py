"""With trainer.exact, every sampled token has the same log-prob in trainer and engine, bit by bit, in every layout.

Each case is a run of GRPO on CPU ranks in bfloat16, from a random model, with updates and reshards between its steps.
Temperature, top-p, top-k and min-p are in effect. In the case without trainer.exact some tokens differ, so that the
comparison is known to see a difference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import AlgorithmConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.training import invariance
from tools.family_models import ONE_RANK
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import DIGITS_REWARD, read_metrics, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(900)]

RECIPE = """
name: exact
loop: rl
model: {path: models/small, dtype: bfloat16}
data: {train: data/train.jsonl, max_prompt_tokens: 96}
trainer: {max_tokens_per_microbatch: 512}
optimizer: {learning_rate: 1e-3}
rollout: {kv_cache_gib: 0.25, sampling: {max_new_tokens: 24, temperature: 0.7, top_p: 0.9, top_k: 50, min_p: 0.01}}
reward: {functions: ["exact_reward:digits"]}
algorithm: {kl_coefficient: 0.1}
train: {prompts_per_step: 6, samples_per_prompt: 4}
"""
STEPS = 4
LARGEST_TIME_RATIO = 1.15
"""Largest accepted ratio of an update's time with trainer.exact to that without."""
MODELS: dict[str, dict[str, Any]] = {
    "small": dict(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2),
    "llama": dict(family="llama", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4),
    "experts": dict(
        family="qwen3_moe", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, experts_per_token=4
    ),
    # The inner dimensions at which one row's product differs from that of many rows.
    "wide": dict(hidden_size=1024, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=64, intermediate_size=3072),
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
TOOLS = (
    "rollout.environment=calculator", "data.train=tools/train.jsonl", "data.max_prompt_tokens=256",
    "model.path=models/tools", "rollout.sampling.max_new_tokens=64",
)  # fmt: skip
PACED = (
    "rollout.placement=separate", "rollout.ranks=1", "rollout.max_staleness=1", "algorithm.importance_sampling=tis",
    "rollout.max_concurrent_requests=4", "weights.overlap=false",
)  # fmt: skip
PARKED = ("rollout.stragglers=park", "algorithm.oversampling=1.5", "algorithm.importance_sampling=tis")
EXPERTS = "model.path=models/experts"
LORA = ("lora.rank=8", "lora.alpha=32")
CASES: dict[str, tuple[int, Sequence[str], dict[str, str]]] = {
    "usual": (1, ["trainer.exact=false"], {}),
    "one rank": (1, [], {}),
    "dp2": (2, [], {}),
    "dp2 -> tp2": (2, ["rollout.tp=2"], {}),
    "tp2 -> tp1": (2, ["trainer.tp=2"], {}),
    "tp2 -> tp2": (2, ["trainer.tp=2", "rollout.tp=2"], {}),
    "tp4 -> tp2": (4, ["trainer.tp=4", "rollout.tp=2"], {}),
    "tp2 without sp -> tp2": (2, ["trainer.tp=2", "rollout.tp=2", "trainer.sequence_parallel=false"], {}),
    "pp2": (2, ["trainer.pp=2"], {}),
    "pp2 vpp2": (2, ["trainer.pp=2", "trainer.vpp=2"], {}),
    "cp2 -> tp2": (2, ["trainer.cp=2", "rollout.tp=2"], {}),
    "tp2 pp2 -> tp4": (4, ["trainer.tp=2", "trainer.pp=2", "rollout.tp=4"], {}),
    "cp2 pp2 -> tp2": (4, ["trainer.cp=2", "trainer.pp=2", "rollout.tp=2"], {}),
    "recompute full": (1, ["trainer.recompute=full"], {}),
    "old log-probs of the engine": (1, ["algorithm.old_logprobs=rollout"], {}),
    "greedy prefixes": (1, ["rollout.sampling.temperature=1.0", "rollout.sampling.top_p=1.0"], {}),
    "llama": (2, ["model.path=models/llama", "rollout.tp=2"], {}),
    "wide": (1, ["model.path=models/wide", "rollout.sampling.max_new_tokens=160"], {}),
    "wide, one request": (1, ["model.path=models/wide", "rollout.max_concurrent_requests=1"], {}),
    "wide, avx2": (1, ["model.path=models/wide"], AVX2),
    "engines ahead": (2, PACED, {}),
    "parked": (1, PARKED, {}),
    "tools": (1, TOOLS, {}),
    "experts, dp2": (2, [EXPERTS], {}),
    "experts, tp2 -> tp2": (2, [EXPERTS, "trainer.tp=2", "rollout.tp=2"], {}),
    "experts, tp2 etp2 -> tp1": (2, [EXPERTS, "trainer.tp=2", "trainer.etp=2"], {}),
    "experts, ep2": (2, [EXPERTS, "trainer.ep=2"], {}),
    "experts, ep2 -> ep2": (
        2,
        [EXPERTS, "trainer.ep=2", "rollout.tp=2", "rollout.vllm.enable_expert_parallel=true"],
        {},
    ),
    "experts, pp2": (2, [EXPERTS, "trainer.pp=2"], {}),
    "experts, cp2": (2, [EXPERTS, "trainer.cp=2"], {}),
    "experts, tp2 ep2 etp2 -> tp4": (4, [EXPERTS, "trainer.tp=2", "trainer.ep=2", "trainer.etp=2", "rollout.tp=4"], {}),
    "lora": (1, LORA, {}),
    "lora, tp2 -> tp2": (2, [*LORA, "trainer.tp=2", "rollout.tp=2"], {}),
    "lora, experts, dp2 ep2": (2, [EXPERTS, *LORA, "trainer.ep=2"], {}),
    "lora, experts, tp2 etp2 -> tp2": (2, [EXPERTS, *LORA, "trainer.tp=2", "trainer.etp=2", "rollout.tp=2"], {}),
}
"""Ranks, overrides and environment variables by name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, reward and recipe."""
    folder = tmp_path_factory.mktemp("exact")
    for name, sizes in MODELS.items():
        make_tiny_model(folder / "models" / name, initializer_range=0.08 if name != "wide" else 0.03, **sizes)
    make_tiny_model(folder / "models/tools", num_layers=2, initializer_range=0.08, tool_words=True)
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    make_tool_data(folder / "tools", sft=8, train=32, heldout=8)
    (folder / "exact_reward.py").write_text(DIGITS_REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize("name", list(CASES))
def test_logprobs_are_bit_equal(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ranks, overrides, environment = CASES[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    run = f"run_{list(CASES).index(name)}"
    train(
        "recipe.yaml", f"name={run}", f"train.steps={STEPS}", "trainer.exact=true",
        f"cluster.ranks_per_node={ranks}", *overrides, folder=folder,
    )  # fmt: skip
    steps = [step for step in read_metrics(folder / "runs" / run) if "logprob_gap/max" in step]
    assert len(steps) == STEPS and all(step["logprob_gap/measured"] > 0 for step in steps)
    is_equal = all(step["logprob_gap/max"] == 0 and step["logprob_gap/bit_equal"] == 1 for step in steps)
    assert is_equal == (name != "usual")


def test_an_update_takes_little_longer(folder: Path, ranks: RankPool) -> None:
    [seconds] = ranks.run(time_updates, str(folder / "models/wide"), 6, world_size=1)
    assert statistics.median(exact / usual for exact, usual in seconds) <= LARGEST_TIME_RATIO


def time_updates(folder: str, pairs: int) -> list[tuple[float, float]]:
    """Return seconds of processor time of updates with and without trainer.exact, in turns, after one of each."""
    # Imported on the rank: the test's own process needs no torch.
    from megarl.training.objective import supervised_loss

    engines = []
    for is_exact in (True, False):
        recipe = invariance.recipe_of(Path(folder), {"exact": is_exact, "max_tokens_per_microbatch": 2048})
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        engine, _, _ = invariance.build(recipe, ONE_RANK, False)
        engine.role = replace(engine.role, objective=supervised_loss)
        engines.append(engine)
    random = np.random.default_rng(0)
    lengths = random.integers(100, 400, 8)
    batch = TokenBatch.from_sequences(
        [TrainingSequence(random.integers(1, 400, length), np.arange(length) > 0) for length in lengths]
    )
    assign_token_weights(batch, AlgorithmConfig(aggregation="token_mean"), int(max(lengths)))

    def measure(engine: Any) -> float:
        started = time.process_time()
        engine.update([batch])
        return time.process_time() - started

    measured = [(measure(engines[0]), measure(engines[1])) for _ in range(pairs + 1)]
    return measured[1:]
