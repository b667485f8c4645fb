"""Recipes whose fields do not fit each other, the model or the files."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families import FAMILIES
from megarl.preflight import check, count_records, kept_kv, shortened_warmups, uncorrected
from megarl.types import ConfigError, DataError


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "rollout_tp", "layout"),
    [
        pytest.param(1, 1, 1, 1, ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), id="one"),
        pytest.param(
            4, 2, 1, 4, ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=4, rank_permutation=(2, 2)), id="(2,1,2)->4"
        ),
        pytest.param(
            4, 4, 1, 2, ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2, rank_permutation=(2, 2)), id="copies of kv heads"
        ),
        pytest.param(6, 1, 3, 2, ParallelConfig(tp=1, pp=3, dp=2, rollout_tp=2), id="(1,3,2)->2"),
    ],
)
def test_sizes_that_fit(
    recipe: Callable[..., Recipe], ranks: int, tp: int, pp: int, rollout_tp: int, layout: ParallelConfig
) -> None:
    rollout = {"tp": rollout_tp}
    assert check(recipe(cluster={"ranks_per_node": ranks}, trainer={"tp": tp, "pp": pp}, rollout=rollout)) == layout


def test_engines_on_ranks_of_their_own_leave_the_trainer_the_others(recipe: Callable[..., Recipe]) -> None:
    sizes = {"cluster": {"ranks_per_node": 6}, "trainer": {"tp": 2}, "rollout": {**SEPARATE, "ranks": 2, "tp": 2}}
    layout = check(recipe(**sizes))
    # Nothing is gained by another order of the ranks.
    assert layout == ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2, rollout_ranks=2)
    assert (layout.world_size, layout.num_ranks, layout.leaders()) == (4, 6, (4,))
    assert str(layout) == "4 ranks: trainer tp 2 * pp 1 * dp 2; 2 ranks: vLLM tp 2 * 1 replicas"


PPO = {"preset": "ppo"}


RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
TWO_ENGINES = SEPARATE | {"ranks": 2}


WRONG = [
    pytest.param(
        {"trackers": ["tensorbord"]},
        ["trackers: unknown tracker 'tensorbord'", "Did you mean 'tensorboard'?"],
        id="tracker",
    ),
    pytest.param(
        {"cluster": RANKS_4, "trainer": {"tp": 1, "pp": 3}},
        ["trainer.tp = 1, trainer.pp = 3", "does not divide the 4 ranks", "tp * pp 1, 2 or 4, or have 3 or 6 ranks"],
        id="world",
    ),
    pytest.param(
        {"cluster": RANKS_4, "trainer": {"tp": 2, "dp": 4}},
        ["trainer.dp = 4", "set trainer.dp=2, leave it out, or have 8 ranks"],
        id="dp",
    ),
    pytest.param(
        {"cluster": RANKS_4, "rollout": {"placement": "separate"}},
        ["rollout.placement = separate", "needs rollout.ranks, how many of the 4 ranks", "use 1, 2 or 3"],
        id="engines without ranks",
    ),
    pytest.param(
        {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 4, "tp": 2}},
        ["rollout.ranks = 4", "leaves none of the 4 ranks", "to the trainer; use 2"],
        id="a trainer without ranks",
    ),
    pytest.param(
        {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 3, "tp": 2}},
        ["rollout.ranks = 3", "is no multiple of rollout.tp 2", "use 2"],
        id="part of an engine",
    ),
    pytest.param(
        {"rollout": {**SEPARATE, "ranks": 1}},
        ["rollout.ranks = 1", "leaves none of the 1 ranks", "have more than 1 ranks (cluster.ranks_per_node)"],
        id="one rank for both",
    ),
    pytest.param(
        {"cluster": RANKS_4, "trainer": {"tp": 2}, "rollout": {**SEPARATE, "ranks": 1}},
        [
            "trainer.tp = 2",
            "does not divide the 3 ranks that train",
            "- rollout.ranks 1",
            "1 or 3, or have 2 or 4 ranks",
        ],
        id="ranks that are left to the trainer",
    ),
    pytest.param(
        {"cluster": RANKS_4, "trainer": {"dp": 4}, "rollout": {**SEPARATE, "ranks": 2}},
        ["trainer.dp = 4", "the 2 ranks that train", "set trainer.dp=2"],
        id="dp of all ranks",
    ),
    pytest.param({"rollout": {"tp": 2}}, ["rollout.tp = 2", "the 1 ranks", "use 1, or have 2 ranks"], id="rollout.tp"),
    pytest.param(
        {"reward": {"functions": ["boxed", "think_answer_tags", "boxed"]}},
        ["reward.functions = ['boxed', 'think_answer_tags', 'boxed']", "boxed is named twice"],
        id="a reward twice",
    ),
    pytest.param({"cluster": {"nodes": 2}}, ["cluster.nodes = 2", "set cluster.nodes=1"], id="nodes"),
    pytest.param({"trainer": {"sequence_parallel": True}}, ["trainer.sequence_parallel", "trainer.tp > 1"], id="sp"),
    pytest.param(
        {"cluster": {"ranks_per_node": 3}, "trainer": {"tp": 3}},
        ["trainer.tp = 3", "4 attention heads, 2 key-value heads", "use 1, 2 or 4"],
        id="heads of the trainer",
    ),
    pytest.param(
        {"cluster": {"ranks_per_node": 3}, "rollout": {"tp": 3}, "train": {"prompts_per_step": 33}},
        ["rollout.tp = 3", "4 attention heads, 448 rows", "2 key-value heads", "use 1, 2 or 4"],
        id="heads of the rollout",
    ),
    pytest.param(
        {"cluster": RANKS_4, "trainer": {"pp": 4}}, ["trainer.pp = 4", "6 layers; use 1, 2, 3 or 6"], id="layers"
    ),
    pytest.param(
        {"cluster": RANKS_4, "train": {"prompts_per_step": 5, "samples_per_prompt": 3, "updates_per_step": 2}},
        ["train.prompts_per_step = 5", "train.samples_per_prompt 3 makes 15", "use 8"],
        id="rl batch, none below",
    ),
    pytest.param(
        {"cluster": RANKS_4, "train": {"prompts_per_step": 11, "samples_per_prompt": 2, "updates_per_step": 1}},
        ["train.prompts_per_step = 11", "makes 22 completions", "use 10 or 12"],
        id="rl batch, the group counts",
    ),
    pytest.param(
        {"loop": "sft", "cluster": RANKS_4, "train": {"prompts_per_step": 30}},
        ["train.prompts_per_step = 30", "data-parallel size 4 (trainer.dp); use 28 or 32"],
        id="sft batch",
    ),
    pytest.param(
        {"loop": "sft", "algorithm": {"aggregation": "constant_length"}},
        ["algorithm.aggregation = constant_length: divides by the longest completion", "sft has none, use another"],
        id="sft has no longest completion",
    ),
    pytest.param(
        {"algorithm": {"importance_sampling": "icepop", "old_logprobs": "rollout"}},
        ["algorithm.importance_sampling = icepop", "set algorithm.old_logprobs=trainer"],
        id="importance_sampling",
    ),
    pytest.param(
        {"rollout": {"stragglers": "abort"}},
        ["rollout.stragglers = abort", "set algorithm.oversampling=1.5"],
        id="no surplus",
    ),
    pytest.param(
        {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 2.0}},
        ["rollout.stragglers = park", "set algorithm.importance_sampling=tis"],
        id="stragglers without a correction",
    ),
    pytest.param(
        {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 3.0, "importance_sampling": "tis"}},
        ["algorithm.oversampling = 3.0", "use at most 2"],
        id="more stragglers than a step trains on",
    ),
    pytest.param(
        {
            "rollout": {"stragglers": "park", "max_staleness": 0},
            "algorithm": {"oversampling": 2.0, "importance_sampling": "tis"},
        },
        ["rollout.max_staleness = 0", "set 1, or rollout.stragglers=wait"],
        id="parked for nothing",
    ),
    pytest.param(
        {"cluster": RANKS_4, "rollout": TWO_ENGINES | {"max_staleness": 2}},
        ["rollout.placement = separate", "rollout.max_staleness = 2", "set algorithm.importance_sampling=tis"],
        id="staleness without a correction",
    ),
    pytest.param(
        {
            "cluster": RANKS_4,
            "rollout": TWO_ENGINES | {"max_staleness": 2, "sync_every": 4},
            "algorithm": {"importance_sampling": "tis"},
        },
        ["rollout.max_staleness = 2", "rollout.sync_every = 4", "up to 3 versions old", "set it to 3 at least"],
        id="staler than the bound before the next reshard",
    ),
    pytest.param(
        {"algorithm": {"importance_sampling": "icepop", "importance_sampling_low": 3.0}},
        ["algorithm.importance_sampling_low = 3.0: set it below algorithm.importance_sampling_high = 2.0"],
        id="icepop",
    ),
    pytest.param(
        {"rollout": {"environment": "calculator", "environment_kwargs": {"tool_secs": 3}}},
        ["rollout.environment_kwargs = {'tool_secs': 3}: calculator does not take them", "tool_seconds"],
        id="a setting that the environment does not take",
    ),
    pytest.param(
        {"rollout": {"environment": "calculator", "environment_kwargs": {"tool_seconds": -1.0}}},
        ["rollout.environment_kwargs = {'tool_seconds': -1.0}", "tool_seconds", "above 0"],
        id="a setting that the environment refuses",
    ),
    pytest.param(
        {"data": {"train": "environment:20"}, "rollout": {"environment": "calculator"}},
        ["data.train = environment:20", "makes no problems"],
        id="an environment that makes no problems",
    ),
    pytest.param(
        {"data": {"validation": {"more": "environment:many"}}, "rollout": {"environment": "guess_number"}},
        ["data.validation.more = environment:many", "from 1 to 1000000"],
        id="no count of problems",
    ),
    pytest.param(
        {"rollout": {"environment": "gem", "environment_kwargs": {"name": "game:Mastermind-v0-easy"}}},
        ["rollout.environment_kwargs", "gem-llm is missing", "environment_kwargs.python"],
        id="the library of an environment is missing",
    ),
    pytest.param(
        {"rollout": {"environment": "search"}},
        ["rollout.environment_kwargs = {}: search", "'corpus'"],
        id="a setting that the environment needs",
    ),
    pytest.param(
        {"rollout": {"environment": "search", "environment_kwargs": {"corpus": "absent.jsonl"}}},
        ["rollout.environment_kwargs", "absent.jsonl: the corpus cannot be read"],
        id="a corpus that is missing",
    ),
    pytest.param(
        {"algorithm": {"advantage": "pass_at_k", "pass_k": 9}}, ["algorithm.pass_k = 9: exceeds"], id="pass at k"
    ),
    pytest.param(
        {"algorithm": {"dynamic_sampling": [0.9, 0.1]}},
        ["algorithm.dynamic_sampling = [0.9, 0.1]: give two accuracies"],
        id="filter range",
    ),
    pytest.param({"train": {"samples_per_prompt": 1}}, ["train.samples_per_prompt = 1", "use 2 or more"], id="group"),
    pytest.param(
        {"algorithm": {"ptx_coefficient": 0.1}}, ["algorithm.ptx_coefficient = 0.1", "give both"], id="ptx without data"
    ),
    pytest.param({"reward": {"functions": []}}, ["reward.functions = []"], id="nothing is right"),
    pytest.param(
        {"reward": {"functions": ["a.b:c", "d/e.py:c"]}},
        ["a.b:c and d/e.py:c would share the metric reward/c/mean"],
        id="two functions of one name",
    ),
    pytest.param(
        {"data": {"system_prompt": "default"}, "reward": {"functions": ["a.b:c"]}},
        ["data.system_prompt = default"],
        id="no default system prompt",
    ),
    pytest.param(
        {
            "data": {"ptx": __file__},
            "algorithm": {"ptx_coefficient": 0.1, "ptx_conversations": 1},
            "train": {"updates_per_step": 2},
        },
        ["algorithm.ptx_conversations = 1", "raise it"],
        id="too few conversations",
    ),
    pytest.param(
        {"train": {"steps": 10, "profile_steps": [2, 11, 30]}},
        ["train.profile_steps = [2, 11, 30]: the run ends with step 10; leave out [11, 30]"],
        id="a profile of no step",
    ),
    pytest.param(
        {"algorithm": PPO, "critic": {"warmup_steps": 10}, "train": {"steps": 10}},
        ["critic.warmup_steps = 10: leaves none of train.steps 10"],
        id="nothing but warm-up",
    ),
    pytest.param(
        {"algorithm": PPO, "critic": {"updates_per_step": 3}},
        ["critic.updates_per_step = 3", "256 completions", "use 1, 2, 4"],
        id="critic's updates",
    ),
    pytest.param(
        {"algorithm": PPO, "critic": {"optimizer": {"name": "sgd"}}},
        ["critic.optimizer.name = sgd"],
        id="critic's optimizer",
    ),
    pytest.param(
        {"trainer": {"max_tokens_per_microbatch": 63}},
        ["trainer.max_tokens_per_microbatch = 63", "max_prompt_tokens 40", "max_new_tokens 24", "raise it to 64"],
        id="microbatch",
    ),
    pytest.param(
        {
            "cluster": {"ranks_per_node": 2},
            "trainer": {"tp": 2, "max_tokens_per_microbatch": 65},
            "rollout": {"sampling": {"max_new_tokens": 25}},
        },
        ["trainer.max_tokens_per_microbatch = 65", "raise it to 66"],
        id="microbatch, padded for sequence parallelism",
    ),
    pytest.param(
        {"rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0}}}, ["temperature = 0"], id="greedy rollout"
    ),
    pytest.param(
        {"evaluation": {"sampling": {"stop_token_ids": [7, 431]}}},
        ["evaluation.sampling.stop_token_ids = [7, 431]", "the model's vocabulary", "give ids"],
        id="stop tokens beyond the vocabulary",
    ),
    pytest.param(
        {"algorithm": {"reward_order": "normalize_then_sum"}},
        ["algorithm.reward_order = normalize_then_sum", "one score alone, boxed", "leave it out"],
        id="one function to normalise",
    ),
    pytest.param(
        {
            "algorithm": {"reward_order": "normalize_then_sum", "overlong_buffer": 4},
            "reward": {"functions": ["boxed", "format"]},
        },
        ["algorithm.reward_order = normalize_then_sum", "algorithm.overlong_buffer", "function length"],
        id="a penalty beside normalised scores",
    ),
    pytest.param(
        {"algorithm": {"kl_coefficient": 0.1, "reference_update_steps": 4}, "lora": {"rank": 4}},
        ["algorithm.reference_update_steps = 4", "without its adapters", "leave one out"],
        id="a reference without adapters",
    ),
    pytest.param(
        {"algorithm": {"entropy_top_share": 0.2, "old_logprobs": "rollout"}},
        ["algorithm.entropy_top_share = 0.2", "set algorithm.old_logprobs=trainer"],
        id="entropies of no pass",
    ),
    pytest.param(
        {"rollout": {"vllm": {"return_sampling_mask": True}}},
        [
            "rollout.vllm.return_sampling_mask",
            "rollout.sampling.top_p, rollout.sampling.top_k and rollout.sampling.min_p",
        ],
        id="sampling masks",
    ),
    pytest.param(
        {"rollout": {"vllm": {"logits_processors": ["mine:MinP"]}}},
        ["rollout.vllm.logits_processors = ['mine:MinP']", "leave it out"],
        id="logits changed before sampling",
    ),
    pytest.param(
        {"rollout": {"vllm": {"logprobs_mode": "raw_logprobs"}}},
        ["rollout.vllm.logprobs_mode = raw_logprobs", "leave it out"],
        id="log-probs of another distribution",
    ),
    pytest.param(
        {
            "cluster": RANKS_4,
            "trainer": {"tp": 2, "cp": 2, "max_tokens_per_microbatch": 65},
            "rollout": {"sampling": {"max_new_tokens": 25}},
        },
        ["trainer.max_tokens_per_microbatch = 65", "raise it to 72"],
        id="microbatch, padded for context parallelism",
    ),
    pytest.param(
        {
            "cluster": RANKS_4,
            "trainer": {"pp": 2, "vpp": 3},
            "train": {"prompts_per_step": 2, "samples_per_prompt": 2, "updates_per_step": 2},
        },
        ["trainer.vpp = 3", "trainer.pp 2 microbatches at a time", "has 1 sequences"],
        id="too few microbatches for chunks",
    ),
    pytest.param({"trainer": {"ep": 2}, "cluster": RANKS_4}, ["trainer.ep = 2", "has no experts"], id="experts"),
    pytest.param({"trainer": {"router_replay": True}}, ["trainer.router_replay", "leave it out"], id="no router"),
    pytest.param(
        {"trainer": {"recompute": "selective", "recompute_modules": []}},
        ["trainer.recompute_modules = []", "trainer.recompute=none"],
        id="nothing computed anew",
    ),
    pytest.param(
        {"trainer": {"recompute": "selective", "recompute_modules": ["mlp", "moe"]}},
        ["trainer.recompute_modules = ['mlp', 'moe']", "has no experts; leave moe out"],
        id="experts computed anew",
    ),
    pytest.param({"lora": {"rank": 65}}, ["lora.rank = 65: exceeds", "narrowest matrix, 64; lower it"], id="lora rank"),
    pytest.param(
        {"loop": "reward_model", "lora": {"rank": 8}}, ["lora.rank = 8", "set lora.rank=0"], id="adapters under a head"
    ),
    pytest.param({"optimizer": {"name": "sgd"}}, ["trainer.distributed_optimizer=false"], id="sgd"),
    pytest.param(
        {"trainer": {"fp8": "blockwise"}},
        ["trainer.fp8 = blockwise", "needs GPUs and Transformer Engine, which are not here; leave it out"],
        id="FP8 on a CPU",
    ),
    pytest.param(
        {"trainer": {"moe_dispatcher": "flex"}},
        ["trainer.moe_dispatcher = flex", "a qwen3 model has no experts; leave it out"],
        id="a dispatcher without experts",
    ),
    *(
        pytest.param(
            {"model": {"dtype": "bfloat16"}, "trainer": {"optimizer_offload_fraction": 0.5}, **fields},
            ["trainer.optimizer_offload_fraction = 0.5", text],
            id=f"an optimizer on the host: {text}",
        )
        for fields, text in (
            ({"model": {"dtype": "float32"}}, "set model.dtype=bfloat16"),
            (
                {"trainer": {"optimizer_offload_fraction": 0.5, "distributed_optimizer": False}},
                "leave trainer.distributed_optimizer out",
            ),
            (
                {"trainer": {"optimizer_offload_fraction": 0.5, "offload": ["optimizer"]}},
                "with optimizer in trainer.offload",
            ),
            ({"lora": {"rank": 4}}, "under lora.rank = 4"),
        )
    ),
    pytest.param(
        {"evaluation": {"sampling": {"max_new_tokens": 2009}}},
        ["evaluation.sampling.max_new_tokens = 2009", "2048 positions; use at most 2008"],
        id="positions",
    ),
    pytest.param(
        {"evaluation": {"samples_per_prompt": 4, "k": [1, 8]}},
        ["evaluation.k = [1, 8]", "evaluation.samples_per_prompt 4; raise that to 8"],
        id="pass@k of more attempts than there are",
    ),
    pytest.param(
        {"evaluation": {"samples_per_prompt": 4, "sampling": {"temperature": 0.0}}},
        ["evaluation.samples_per_prompt = 4", "evaluation.sampling.temperature = 0"],
        id="equal attempts",
    ),
    pytest.param(
        {"checkpoint": {"best": "val/a/accuracy"}},
        ["checkpoint.best = val/a/accuracy", "give data.validation"],
        id="best of no set",
    ),
    pytest.param(
        {"model": {"dtype": "float32"}, "rollout": {"quantization": "fp8"}},
        ["rollout.quantization = fp8", "model.dtype is float32", "set model.dtype=bfloat16"],
        id="fp8 of float32",
    ),
    pytest.param(
        {"rollout": {"quantization": "fp8", "vllm": {"linear_backend": "marlin"}}},
        ["rollout.vllm.linear_backend = 'marlin'", "set it to auto, triton, cutlass, deep_gemm"],
        id="fp8 in a kernel's own form",
    ),
    pytest.param(
        {"rollout": {"quantization": "fp8", "vllm": {"quantization": "fp8_per_tensor"}}},
        ["rollout.vllm.quantization = 'fp8_per_tensor' would quantise too; leave one out"],
        id="fp8 twice",
    ),
    pytest.param(
        {"rollout": {"quantization": "fp8", "vllm": {"enable_lora": True}}},
        ["rollout.quantization = fp8: adapters inside vLLM"],
        id="fp8 beside adapters in the engine",
    ),
    pytest.param(
        {"rollout": {"vllm": {"kv_cache_dtype": "fp8"}}},
        ["rollout.vllm.kv_cache_dtype: set rollout.kv_cache_dtype instead"],
        id="type of the cache",
    ),
    pytest.param({"reward": {"functions": ["bxed"]}}, ["reward.functions", "'bxed'", "'boxed'"], id="reward"),
    pytest.param(
        {"optimizer": {"learning_rate": 1e-6, "min_learning_rate": 1e-5}}, ["optimizer.min_learning_rate"], id="minimum"
    ),
]


@pytest.mark.parametrize(("changed", "told"), WRONG)
def test_each_misfit_is_one_line_with_field_value_and_remedy(
    recipe: Callable[..., Recipe], changed: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(recipe(**changed))
    title, *lines = str(caught.value).splitlines()
    assert title == "recipe small: 1 error"
    assert len(lines) == 1
    for words in told:
        assert words in lines[0]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"loop": "sft", "train": {"samples_per_prompt": 1}}, id="no group in sft"),
        pytest.param({"loop": "sft", "trainer": {"max_tokens_per_microbatch": 63}}, id="no rollout length in sft"),
        pytest.param({"trainer": {"max_tokens_per_microbatch": 64}}, id="microbatch of one sequence"),
        pytest.param({"evaluation": {"sampling": {"max_new_tokens": 2008}}}, id="all positions"),
        pytest.param({"optimizer": {"warmup_steps": 20}, "train": {"steps": 10, "updates_per_step": 2}}, id="warm-up"),
        pytest.param({"evaluation": {"sampling": {"top_p": 0.7, "top_k": 20}}}, id="truncated evaluation"),
        pytest.param({"rollout": {"vllm": {"logprobs_mode": "processed_logprobs"}}}, id="the log-probs that are asked"),
        pytest.param(
            {"loop": "sft", "rollout": {"sampling": {"max_new_tokens": 24, "top_p": 0.7}}},
            id="nothing sampled to train",
        ),
        pytest.param({"algorithm": PPO, "train": {"samples_per_prompt": 1}}, id="no group with a critic"),
        pytest.param({"rollout": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}, id="fp8"),
        pytest.param(
            {"rollout": {"quantization": "fp8_per_channel", "vllm": {"linear_backend": "Deep-GEMM"}}},
            id="fp8 by channel, moe_backend of no experts",
        ),
    ],
)
def test_the_limits_themselves_are_allowed(recipe: Callable[..., Recipe], changed: dict[str, Any]) -> None:
    assert check(recipe(**changed)).world_size == 1


def test_fp8_is_refused_for_experts_and_families_that_it_is_not_known_for(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"model": {"path": str(tiny_model(family="qwen3_moe", num_layers=2))}}
    vllm = {"moe_backend": "flashinfer_trtllm"}
    with pytest.raises(ConfigError) as caught:
        check(recipe(**experts, rollout={"quantization": "fp8", "vllm": vllm}))
    assert "rollout.vllm.moe_backend = 'flashinfer_trtllm': its kernels keep FP8 weights" in str(caught.value)
    assert "set it to auto, triton, batched_triton or deep_gemm" in str(caught.value)
    with pytest.raises(ConfigError, match=r"vLLM has no such experts on a CPU; set rollout.quantization=fp8"):
        check(recipe(**experts, rollout={"quantization": "fp8_per_channel"}))
    monkeypatch.setitem(FAMILIES, "qwen3", dataclasses.replace(FAMILIES["qwen3"], is_quantisable=False))
    with pytest.raises(ConfigError) as caught:
        check(recipe(rollout={"quantization": "fp8"}))
    assert "rollout.quantization = fp8: what vLLM makes of a qwen3 model's weights is not known" in str(caught.value)
    assert "qwen3_moe; set rollout.quantization=none" in str(caught.value)


def test_faults_of_recipe_and_files_come_together(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = {"model": {"path": str(tmp_path)}, "data": {"train": "absent.jsonl", "validation": {"easy": str(empty)}}}
    files = (
        "config.json: not found",
        "neither model.safetensors nor",
        "tokenizer.json: not found",
        "absent.jsonl: data.train is not there",
        "empty.jsonl: data.validation.easy is empty",
    )
    with pytest.raises(ConfigError) as caught:
        check(recipe(**broken, rollout={"tp": 2}, train={"samples_per_prompt": 1}))
    told = str(caught.value)
    assert all(words in told for words in ("rollout.tp = 2", "train.samples_per_prompt = 1", *files))
    with pytest.raises(DataError) as files_alone:
        check(recipe(**broken))
    assert all(words in str(files_alone.value) for words in files)


def test_one_sample_a_prompt_is_sound_where_it_keeps_its_reward(recipe: Callable[..., Recipe]) -> None:
    check(recipe(train={"samples_per_prompt": 1}, algorithm={"lone_sample": "reward"}))


def test_a_warm_up_longer_than_the_run_is_held_to_it(recipe: Callable[..., Recipe]) -> None:
    long = recipe(optimizer={"warmup_steps": 21}, train={"steps": 10, "updates_per_step": 2})
    check(long)
    assert [*shortened_warmups(long)] == ["optimizer.warmup_steps = 21: the run makes 20 updates; 20 used"]
    assert [
        *shortened_warmups(recipe(optimizer={"warmup_steps": 20}, train={"steps": 10, "updates_per_step": 2}))
    ] == []


@pytest.mark.parametrize(
    "rollout",
    [TWO_ENGINES | {"max_staleness": 2}, {"stragglers": "park", "max_staleness": 2}],
    ids=["separate", "park"],
)
def test_stale_tokens_go_uncorrected_only_where_that_is_written(
    recipe: Callable[..., Recipe], rollout: dict[str, Any]
) -> None:
    surplus = {} if "placement" in rollout else {"oversampling": 2.0}
    base = recipe(cluster=RANKS_4, rollout=rollout, algorithm={**surplus, "importance_sampling": "none"})
    check(base)
    [told] = uncorrected(base)
    assert base.algorithm.importance_sampling is None and "up to rollout.max_staleness = 2 versions old" in told
    for corrected in ({"importance_sampling": "tis"}, {"old_logprobs": "rollout"}):
        made = recipe(cluster=RANKS_4, rollout=rollout, algorithm=surplus | corrected)
        check(made)
        assert [*uncorrected(made)] == []
    assert [*kept_kv(base)] == []
    unclipped = {"old_logprobs": "rollout", "policy_loss": "policy_gradient"}
    with pytest.raises(ConfigError, match="nothing corrects for it"):
        check(recipe(cluster=RANKS_4, rollout=rollout, algorithm=surplus | unclipped))


def test_a_source_of_a_mixture_is_checked_as_a_recipe_is(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train = recipe().data.train
    sources: dict[str, Any] = {
        "sums": {"data": {"train": train}, "reward": {"functions": ["boxed", "boxed"]}},
        "games": {"data": {"train": "environment:4"}, "rollout": {"environment": "guess_number"}},
        "lost": {"data": {"train": str(tmp_path / "lost.jsonl")}, "rollout": {"sampling": {"max_new_tokens": 10**6}}},
    }
    mixture = {"data": {"max_prompt_tokens": 40}, "mixture": sources}
    with pytest.raises(ConfigError) as error:
        check(recipe(**mixture, trainer={"tp": 3}))
    lines = str(error.value).splitlines()[1:]
    shared = [line for line in lines if "trainer.tp = 3" in line]
    assert shared and len(set(shared)) == len(shared), "what all have in common is told once"
    assert not any("mixture." in line for line in shared)
    assert any("mixture.sums: reward.functions" in line and "twice" in line for line in lines)
    assert any("mixture.lost: " in line and "rollout.sampling.max_new_tokens" in line for line in lines)
    assert any(line.strip().startswith("mixture.lost: ") and "lost.jsonl" in line for line in lines)
    assert not any("mixture.games" in line for line in lines)
    del sources["lost"], sources["sums"]["reward"]
    sound = recipe(**mixture)
    check(sound)
    assert count_records(sound) == {"sums train": 3, "games train": 4}
    sources["sums"]["data"]["curriculum"] = {"band": [0.1, 0.9], "by": "level"}
    with pytest.raises(DataError, match=r"no field 'level' of data\.curriculum\.by"):
        count_records(recipe(**mixture))


def test_a_run_of_no_steps_needs_something_to_evaluate(recipe: Callable[..., Recipe]) -> None:
    sound = recipe()
    with pytest.raises(ConfigError, match=r"train\.steps = 0: only evaluates, but data\.validation is not given"):
        check(recipe(train={"steps": 0}))
    check(recipe(train={"steps": 0}, data={"validation": {"held_out": sound.data.train}}))


def test_a_chat_template_must_write_tools_and_show_how_it_writes_calls(
    recipe: Callable[..., Recipe], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    changed = {"model": {"path": str(model)}, "rollout": {"environment": "calculator"}}
    check(recipe(**changed))
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(plain)
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser: .* give one of hermes"):
        check(recipe(**changed))
    changed["rollout"]["tool_parser"] = "hermes"
    with pytest.raises(ConfigError, match=r"rollout\.environment = 'calculator': the chat template writes no tools"):
        check(recipe(**changed))
    (model / "chat_template.jinja").write_text(f"{{{{ tools }}}}{plain}")
    check(recipe(**changed))


@pytest.mark.parametrize(
    ("measure", "function", "told"),
    [
        ("acc", "boxed", "measured are accuracy"),
        ("majority_at_4", "code", "take pass_at_K"),
        ("pass_at_8", "boxed", "put 8 into evaluation.k"),
        ("reward/code/passed", "boxed", "measured are accuracy"),
        ("accuracy/low", "boxed", None),
        ("majority_at_4", "multiple_choice", None),
        ("reward/code/passed", "code", None),
        ("data_source/org_a/pass_at_4", "boxed", None),
    ],
)
def test_the_best_model_is_chosen_by_what_is_measured(
    recipe: Callable[..., Recipe], measure: str, function: str, told: str | None
) -> None:
    evaluation = {"samples_per_prompt": 4, "sampling": {"temperature": 1.0}}
    train = recipe().data.train
    made = recipe(
        data={"validation": {"a": train}},
        evaluation=evaluation,
        checkpoint={"best": f"val/a/{measure}"},
        reward={"functions": [function]},
    )
    if told is None:
        check(made)
        return
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert f"checkpoint.best = val/a/{measure}" in str(caught.value) and told in str(caught.value)


def test_keys_and_values_that_outlive_their_weights_are_told(recipe: Callable[..., Recipe]) -> None:
    rollout = TWO_ENGINES | {"max_staleness": 1, "recompute_kv": False}
    made = recipe(cluster=RANKS_4, rollout=rollout, algorithm={"importance_sampling": "tis"})
    check(made)
    [told] = kept_kv(made)
    assert told.startswith("rollout.recompute_kv = false: requests that a reshard interrupts go on over the old keys")
