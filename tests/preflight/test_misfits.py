"""Refused recipes, one row each: the sections changed, the field and value of the error, the numbers in its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

PPO = {"preset": "ppo"}
RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
TWO_ENGINES = SEPARATE | {"ranks": 2}
ENGINES_2 = {"groups": {"engines": {"ranks_per_node": 2}}}
ADAPTER = {"rank": 8, "sync": "adapter"}
DISTILLED: dict[str, Any] = {"loop": "distillation"}
TAUGHT = {"teacher": "policy", "teacher_prompt": "{prompt} {context}", "context": ["record.gt_answer"]}
UNJUDGED = {"functions": ["boxed_of_mine.py:exact", "boxed_of_mine.py:brevity"]}
"""Functions of the user's, none of which says that it judges the answer."""


class Elsewhere:
    """An agent in a container that cannot reach the machine's loopback addresses."""

    runs_elsewhere = True

    async def run(self, problem: Any, base_url: str, api_key: str) -> float:
        return 0.0


class Misfit(NamedTuple):
    """A refused recipe."""

    changed: dict[str, Any]
    """Sections changed in a sound recipe."""
    place: str
    """Field and value that the error's line begins with."""
    facts: list[str]
    """Other fields, values and numbers that it names, those of its remedy among them. Prose is not compared."""


MISFITS = {
    # Parallel sizes, ranks and batches.
    "world": Misfit(
        {"cluster": RANKS_4, "trainer": {"tp": 1, "pp": 3}},
        "trainer.tp = 1, trainer.pp = 3",
        ["4 ranks", "1, 2 or 4", "3 or 6 ranks"],
    ),
    "dp": Misfit(
        {"cluster": RANKS_4, "trainer": {"tp": 2, "dp": 4}}, "trainer.dp = 4", ["make 2", "trainer.dp=2", "8 ranks"]
    ),
    "engines without ranks": Misfit(
        {"cluster": RANKS_4, "rollout": {"placement": "separate"}},
        "rollout.placement = separate",
        ["rollout.ranks", "4 ranks", "1, 2 or 3"],
    ),
    "a trainer without ranks": Misfit(
        {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 4, "tp": 2}}, "rollout.ranks = 4", ["4 ranks", "use 2"]
    ),
    "part of an engine": Misfit(
        {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 3, "tp": 2}},
        "rollout.ranks = 3",
        ["rollout.tp 2", "use 2"],
    ),
    "one rank for both": Misfit(
        {"rollout": {**SEPARATE, "ranks": 1}},
        "rollout.ranks = 1",
        ["1 ranks", "more than 1 ranks", "cluster.ranks_per_node"],
    ),
    "ranks that are left to the trainer": Misfit(
        {"cluster": RANKS_4, "trainer": {"tp": 2}, "rollout": {**SEPARATE, "ranks": 1}},
        "trainer.tp = 2, trainer.pp = 1",
        ["3 training ranks", "rollout.ranks 1", "1 or 3", "2 or 4 ranks"],
    ),
    "dp of all ranks": Misfit(
        {"cluster": RANKS_4, "trainer": {"dp": 4}, "rollout": {**SEPARATE, "ranks": 2}},
        "trainer.dp = 4",
        ["2 training ranks", "trainer.dp=2", "4 ranks"],
    ),
    "rollout.tp": Misfit({"rollout": {"tp": 2}}, "rollout.tp = 2", ["1 ranks", "use 1", "2 ranks"]),
    "nodes": Misfit(
        {"cluster": {"nodes": 2}},
        "cluster.nodes = 2",
        ["cluster.nodes=1", "cluster.ranks_per_node=2", "megarl slurm submit"],
    ),
    "nodes of engines": Misfit(
        {"cluster": ENGINES_2, "rollout": SEPARATE}, "cluster.groups.engines", ["rollout.ranks", "megarl slurm submit"]
    ),
    "nodes of engines that share the trainer's ranks": Misfit(
        {"cluster": ENGINES_2 | {"launcher": "ray"}}, "cluster.groups.engines", ["rollout.placement = separate"]
    ),
    "ranks beside nodes of engines": Misfit(
        {"cluster": ENGINES_2 | {"launcher": "ray"}, "rollout": {**SEPARATE, "ranks": 1}},
        "rollout.ranks = 1",
        ["cluster.groups.engines", "make 2"],
    ),
    "nodes of engines that hold no engine": Misfit(
        {"cluster": ENGINES_2 | {"launcher": "ray"}, "rollout": {**SEPARATE, "tp": 4}},
        "rollout.tp = 4",
        ["2 ranks", "cluster.groups.engines"],
    ),
    "heads of the trainer": Misfit(
        {"cluster": {"ranks_per_node": 3}, "trainer": {"tp": 3}},
        "trainer.tp = 3",
        ["4 attention heads", "2 key-value heads", "1, 2 or 4"],
    ),
    "heads of the rollout": Misfit(
        {"cluster": {"ranks_per_node": 3}, "rollout": {"tp": 3}, "train": {"prompts_per_step": 33}},
        "rollout.tp = 3",
        ["4 attention heads", "448 rows", "2 key-value heads", "1, 2 or 4"],
    ),
    "layers": Misfit(
        {"cluster": RANKS_4, "trainer": {"pp": 4, "vpp": 2}}, "trainer.pp = 4", ["trainer.vpp 2", "6 layers"]
    ),
    "rl batch, none below": Misfit(
        {"cluster": RANKS_4, "train": {"prompts_per_step": 5, "samples_per_prompt": 3, "updates_per_step": 2}},
        "train.prompts_per_step = 5",
        ["train.samples_per_prompt 3", "15", "train.updates_per_step 2", "trainer.dp", "use 8"],
    ),
    "rl batch, the group counts": Misfit(
        {"cluster": RANKS_4, "train": {"prompts_per_step": 11, "samples_per_prompt": 2, "updates_per_step": 1}},
        "train.prompts_per_step = 11",
        ["22", "use 10 or 12"],
    ),
    "kto without another prompt": Misfit(
        {"loop": "preference", "preference": {"loss": "kto"}, "train": {"prompts_per_step": 1}},
        "train.prompts_per_step = 1",
        ["preference.loss kto", "2 or more"],
    ),
    "sft batch": Misfit(
        {"loop": "sft", "cluster": RANKS_4, "train": {"prompts_per_step": 30}},
        "train.prompts_per_step = 30",
        ["size 4", "trainer.dp", "use 28 or 32"],
    ),
    # Algorithms, rewards, staleness and evaluation.
    "tracker": Misfit({"trackers": ["tensorbord"]}, "trackers", ["'tensorbord'", "'tensorboard'"]),
    "a reward twice": Misfit(
        {"reward": {"functions": ["boxed", "think_answer_tags", "boxed"]}},
        "reward.functions = ['boxed', 'think_answer_tags', 'boxed']",
        ["boxed is"],
    ),
    "importance_sampling": Misfit(
        {"algorithm": {"importance_sampling": "icepop", "old_logprobs": "rollout"}},
        "algorithm.importance_sampling = icepop",
        ["algorithm.old_logprobs=trainer"],
    ),
    "DPPO and TIS": Misfit(
        {"algorithm": {"preset": "dppo_tv", "importance_sampling": "tis"}},
        "algorithm.importance_sampling = tis",
        [
            "algorithm.policy_loss = dppo_tv",
            "leave out algorithm.importance_sampling",
            "algorithm.old_logprobs=rollout",
        ],
    ),
    "VESPO and a rejection of sequences": Misfit(
        {"algorithm": {"policy_loss": "vespo", "importance_sampling": "sequence_rejection"}},
        "algorithm.importance_sampling = sequence_rejection",
        ["algorithm.policy_loss = vespo", "algorithm.old_logprobs=rollout"],
    ),
    "DPPO of the policy and itself": Misfit(
        {"algorithm": {"policy_loss": "dppo_kl"}},
        "algorithm.policy_loss = dppo_kl",
        ["algorithm.old_logprobs = trainer", "algorithm.old_logprobs=rollout", "train.updates_per_step"],
    ),
    "DRO without a strength": Misfit(
        {"algorithm": {"policy_loss": "dro", "old_logprobs": "rollout"}},
        "algorithm.policy_loss_kwargs.beta",
        ["dro"],
    ),
    "a weight of sequences with GAE": Misfit(
        {"algorithm": {"preset": "vespo", "advantage": "gae"}},
        "algorithm.policy_loss = vespo",
        ["algorithm.advantage = gae", "algorithm.advantage=grpo", "dppo_tv"],
    ),
    "a weight of sequences with advantages of turns": Misfit(
        {
            "algorithm": {"preset": "vespo", "turn_discount": 0.9},
            "rollout": {"environment": "calculator", "max_turns": 4},
        },
        "algorithm.policy_loss = vespo",
        ["algorithm.turn_discount = 0.9", "leave out algorithm.turn_discount"],
    ),
    "a weight of sequences with advantages of states": Misfit(
        {
            "algorithm": {"preset": "vespo", "state_weight": 1.0},
            "data": {"train": "environment:8"},
            "rollout": {"environment": "guess_number", "max_turns": 4},
        },
        "algorithm.policy_loss = vespo",
        ["algorithm.state_weight = 1", "leave out algorithm.state_weight"],
    ),
    "states of an environment without them": Misfit(
        {"algorithm": {"preset": "gigpo"}, "rollout": {"environment": "calculator", "max_turns": 4}},
        "algorithm.state_weight = 1",
        ["rollout.environment = calculator", "names_states = True", "algorithm.state_weight=0"],
    ),
    "states of single turns": Misfit(
        {"algorithm": {"preset": "gigpo"}},
        "algorithm.state_weight = 1",
        ["rollout.environment = single_turn", "guess_number", "algorithm.state_weight=0"],
    ),
    "states of an agent": Misfit(
        {"algorithm": {"preset": "gigpo"}, "rollout": {"environment": "command", "agent": {"command": ["true"]}}},
        "algorithm.state_weight = 1",
        ["rollout.environment = command", "algorithm.state_weight=0"],
    ),
    "roles of an environment without them": Misfit(
        {"algorithm": {"advantage": "rae"}},
        "algorithm.advantage = rae",
        ["rollout.environment = single_turn", "names_roles = True", "algorithm.advantage=grpo"],
    ),
    "states and discounted turns": Misfit(
        {
            "algorithm": {"preset": "gigpo", "turn_discount": 0.9},
            "data": {"train": "environment:8"},
            "rollout": {"environment": "guess_number", "max_turns": 4},
        },
        "algorithm.state_weight = 1",
        ["algorithm.turn_discount = 0.9"],
    ),
    "a weight of sequences with a KL of tokens": Misfit(
        {"algorithm": {"preset": "vespo", "kl_coefficient": 0.1, "kl_placement": "return"}},
        "algorithm.policy_loss = vespo",
        ["algorithm.kl_placement = return", "algorithm.kl_placement=loss"],
    ),
    "a mask of sequences of the policy and itself": Misfit(
        {"algorithm": {"off_policy_limit": 0.5}},
        "algorithm.off_policy_limit = 0.5",
        ["algorithm.old_logprobs = trainer", "algorithm.old_logprobs=rollout", "train.updates_per_step"],
    ),
    "a mask of sequences with GAE": Misfit(
        {"algorithm": PPO | {"off_policy_limit": 0.5, "old_logprobs": "rollout"}},
        "algorithm.off_policy_limit = 0.5",
        ["algorithm.advantage = gae", "algorithm.advantage=grpo", "leave it out"],
    ),
    "a mask of sequences with advantages of turns": Misfit(
        {
            "algorithm": {"off_policy_limit": 0.5, "old_logprobs": "rollout", "turn_discount": 1.0},
            "rollout": {"environment": "calculator", "max_turns": 4},
        },
        "algorithm.off_policy_limit = 0.5",
        ["algorithm.turn_discount = 1.0", "leave out algorithm.turn_discount"],
    ),
    "a penalty on drift in a single update": Misfit(
        {"algorithm": {"preset": "kl_cov"}},
        "algorithm.kl_cov_share = 0.0002",
        ["train.updates_per_step above 1", "algorithm.clip_cov_share"],
    ),
    "covariances without a pass before the update": Misfit(
        {"algorithm": {"clip_cov_share": 0.1, "old_logprobs": "rollout"}},
        "algorithm.clip_cov_share = 0.1",
        ["algorithm.old_logprobs = rollout", "algorithm.old_logprobs=trainer"],
    ),
    "a range of covariances upside down": Misfit(
        {"algorithm": {"preset": "clip_cov", "clip_cov_range": [5, 1]}},
        "algorithm.clip_cov_range = [5.0, 1.0]",
        ["the lower one first"],
    ),
    "no surplus": Misfit(
        {"rollout": {"stragglers": "abort"}}, "rollout.stragglers = abort", ["algorithm.oversampling=1.5"]
    ),
    "stragglers without a correction": Misfit(
        {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 2.0}},
        "rollout.stragglers = park",
        [
            "rollout.max_staleness = 1",
            "algorithm.importance_sampling=tis",
            "algorithm.old_logprobs=rollout",
            "algorithm.importance_sampling=none",
        ],
    ),
    "more stragglers than a step trains on": Misfit(
        {"rollout": {"stragglers": "park"}, "algorithm": {"oversampling": 3.0, "importance_sampling": "tis"}},
        "algorithm.oversampling = 3.0",
        ["rollout.stragglers = park", "at most 2"],
    ),
    "parked for nothing": Misfit(
        {
            "rollout": {"stragglers": "park", "max_staleness": 0},
            "algorithm": {"oversampling": 2.0, "importance_sampling": "tis"},
        },
        "rollout.max_staleness = 0",
        ["set 1", "rollout.stragglers=wait"],
    ),
    "staleness without a correction": Misfit(
        {"cluster": RANKS_4, "rollout": TWO_ENGINES | {"max_staleness": 2}},
        "rollout.placement = separate",
        ["rollout.max_staleness = 2", "algorithm.importance_sampling=tis"],
    ),
    "staler than the bound before the next reshard": Misfit(
        {
            "cluster": RANKS_4,
            "rollout": TWO_ENGINES | {"max_staleness": 2, "sync_every": 4},
            "algorithm": {"importance_sampling": "tis"},
        },
        "rollout.max_staleness = 2",
        ["rollout.sync_every = 4", "up to 3", "at least 3", "to 4"],
    ),
    "icepop": Misfit(
        {"algorithm": {"importance_sampling": "icepop", "importance_sampling_low": 3.0}},
        "algorithm.importance_sampling_low = 3.0",
        ["algorithm.importance_sampling_high = 2.0"],
    ),
    "pass at k": Misfit(
        {"algorithm": {"advantage": "pass_at_k", "pass_k": 9}}, "algorithm.pass_k = 9", ["train.samples_per_prompt 8"]
    ),
    "pass at all": Misfit(
        {"algorithm": {"advantage": "pass_at_k", "pass_k": 8}},
        "algorithm.pass_k = 8",
        ["train.samples_per_prompt 8", "at least 9"],
    ),
    "a step of one sample": Misfit(
        {
            "algorithm": {"advantage": "global_baseline"},
            "train": {"prompts_per_step": 1, "samples_per_prompt": 1},
        },
        "train.prompts_per_step = 1",
        ["algorithm.advantage global_baseline", "2 or more"],
    ),
    "a final decay longer than the run": Misfit(
        {"optimizer": {"schedule": "wsd", "decay_steps": 30}, "train": {"steps": 20}},
        "optimizer.decay_steps = 30",
        ["20 updates", "train.steps"],
    ),
    "a final decay that begins in the warm-up": Misfit(
        {"optimizer": {"schedule": "wsd", "decay_steps": 16, "warmup_steps": 5}, "train": {"steps": 20}},
        "optimizer.decay_steps = 16",
        ["20 updates", "15 of them"],
    ),
    "a limit of the ratio without drift": Misfit(
        {"algorithm": {"skip_ratio": 20.0}},
        "algorithm.skip_ratio = 20.0",
        ["algorithm.old_logprobs=rollout", "train.updates_per_step above 1"],
    ),
    "filter range": Misfit(
        {"algorithm": {"dynamic_sampling": [0.9, 0.1]}}, "algorithm.dynamic_sampling = [0.9, 0.1]", []
    ),
    "spread with an upper bound": Misfit(
        {"algorithm": {"dynamic_sampling": [0.5, 0.9], "dynamic_sampling_metric": "reward"}},
        "algorithm.dynamic_sampling = [0.5, 0.9]",
        ["algorithm.dynamic_sampling_metric = reward", "[0.5, 1]"],
    ),
    "DAPO by an accuracy that nothing measures": Misfit(
        {"reward": UNJUDGED, "algorithm": {"preset": "dapo", "dynamic_sampling_metric": "accuracy"}},
        "algorithm.dynamic_sampling_metric = accuracy",
        ["judges_answer: true"],
    ),
    "a range of accuracies that nothing measures": Misfit(
        {"reward": UNJUDGED, "algorithm": {"dynamic_sampling": [0.2, 0.8]}},
        "algorithm.dynamic_sampling = [0.2, 0.8]",
        ["judges_answer: true"],
    ),
    "a curriculum without verdicts": Misfit(
        {"reward": UNJUDGED, "data": {"curriculum": {"band": [0.1, 0.9]}}},
        "data.curriculum.band = [0.1, 0.9]",
        ["judges_answer: true"],
    ),
    "pass_at_k without verdicts": Misfit(
        {"reward": UNJUDGED, "algorithm": {"advantage": "pass_at_k"}},
        "algorithm.advantage = pass_at_k",
        ["judges_answer: true"],
    ),
    "group": Misfit(
        {"train": {"samples_per_prompt": 1}},
        "train.samples_per_prompt = 1",
        ["2 or more", "algorithm.lone_sample=reward"],
    ),
    "nothing is right": Misfit({"reward": {"functions": []}}, "reward.functions is empty", ["reward.model"]),
    "two functions of one name": Misfit(
        {"reward": {"functions": ["a.b:c", "d/e.py:c"]}},
        "reward.functions = ['a.b:c', 'd/e.py:c']",
        ["a.b:c and d/e.py:c", "reward/c/mean"],
    ),
    "nothing but warm-up": Misfit(
        {"algorithm": PPO, "critic": {"warmup_steps": 10}, "train": {"steps": 10}},
        "critic.warmup_steps = 10",
        ["train.steps 10"],
    ),
    "critic's updates": Misfit(
        {"algorithm": PPO, "critic": {"updates_per_step": 3}},
        "critic.updates_per_step = 3",
        ["256 completions", "1, 2, 4, 8, 16, 32, 64, 128 or 256"],
    ),
    "greedy rollout": Misfit(
        {"rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0}}},
        "rollout.sampling.temperature = 0",
        ["above 0"],
    ),
    "a temperature that the engine raises": Misfit(
        {"rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0.004}}},
        "rollout.sampling.temperature = 0.004",
        ["0.01 or more"],
    ),
    "a buffer as long as the budget": Misfit(
        {
            "algorithm": {"overlong_buffer": 12},
            "rollout": {
                "environment": "calculator",
                "sampling": {"max_new_tokens": 24},
                "budget": {"sampled_tokens": 10},
            },
        },
        "algorithm.overlong_buffer = 12",
        ["rollout.budget.sampled_tokens 10"],
    ),
    "one function to normalise": Misfit(
        {"algorithm": {"reward_order": "normalize_then_sum"}}, "algorithm.reward_order = normalize_then_sum", ["boxed"]
    ),
    "a penalty beside normalised scores": Misfit(
        {
            "algorithm": {"reward_order": "normalize_then_sum", "overlong_buffer": 4},
            "reward": {"functions": ["boxed", "format"]},
        },
        "algorithm.reward_order = normalize_then_sum",
        ["algorithm.overlong_buffer", "length"],
    ),
    "entropies of no pass": Misfit(
        {"algorithm": {"entropy_top_share": 0.2, "old_logprobs": "rollout"}},
        "algorithm.entropy_top_share = 0.2",
        ["algorithm.old_logprobs=trainer"],
    ),
    "pass@k of more attempts than there are": Misfit(
        {"evaluation": {"samples_per_prompt": 4, "k": [1, 8]}},
        "evaluation.k = [1, 8]",
        ["evaluation.samples_per_prompt 4", "to 8"],
    ),
    "equal attempts": Misfit(
        {"evaluation": {"samples_per_prompt": 4, "sampling": {"temperature": 0.0}}},
        "evaluation.samples_per_prompt = 4",
        ["evaluation.sampling.temperature = 0"],
    ),
    "reward": Misfit({"reward": {"functions": ["bxed"]}}, "reward.functions", ["'bxed'", "'boxed'"]),
    # Environments and data.
    "a name of a field that no record has": Misfit(
        {"data": {"fields": {"label": "y"}}}, "data.fields.label = y", ["this run reads problems", "tools or answer"]
    ),
    "a name of a field that no record of a set has": Misfit(
        {"data": {"validation": {"a": {"path": "README.md", "fields": {"chosen": "y"}}}}},
        "data.validation.a.fields.chosen = y",
        ["this run reads problems", "tools or answer"],
    ),
    "a setting that the environment does not take": Misfit(
        {"rollout": {"environment": "calculator", "environment_kwargs": {"tool_secs": 3}}},
        "rollout.environment_kwargs = {'tool_secs': 3}",
        ["calculator", "'tool_secs'", "tool_seconds"],
    ),
    "a setting that the environment refuses": Misfit(
        {"rollout": {"environment": "calculator", "environment_kwargs": {"tool_seconds": -1.0}}},
        "rollout.environment_kwargs = {'tool_seconds': -1.0}",
        ["calculator", "tool_seconds above 0"],
    ),
    "an environment that makes no problems": Misfit(
        {"data": {"train": "environment:20"}, "rollout": {"environment": "calculator"}},
        "rollout.environment_kwargs",
        ["data.train = environment:20"],
    ),
    "no count of problems": Misfit(
        {"data": {"validation": {"more": "environment:many"}}, "rollout": {"environment": "guess_number"}},
        "data.validation.more = environment:many",
        ["from 1 to 1000000"],
    ),
    "the library of an environment is missing": Misfit(
        {"rollout": {"environment": "gem", "environment_kwargs": {"name": "game:Mastermind-v0-easy"}}},
        "rollout.environment_kwargs",
        ["gem-llm", "rollout.environment_kwargs.python"],
    ),
    "an endpoint that the agent cannot reach": Misfit(
        {"rollout": {"environment": f"{__name__}:Elsewhere"}},
        "rollout.endpoint.host = 127.0.0.1",
        ["172.17.0.1", "rollout.endpoint.token"],
    ),
    "a setting that the environment needs": Misfit(
        {"rollout": {"environment": "search"}}, "rollout.environment_kwargs = {}", ["search", "'corpus'"]
    ),
    "a corpus that is missing": Misfit(
        {"rollout": {"environment": "search", "environment_kwargs": {"corpus": "absent.jsonl"}}},
        "rollout.environment_kwargs",
        ["absent.jsonl"],
    ),
    "no default system prompt": Misfit(
        {"data": {"system_prompt": "default"}, "reward": {"functions": ["a.b:c"]}},
        "data.system_prompt = default",
        ["a.b:c"],
    ),
    "too few conversations": Misfit(
        {
            "data": {"ptx": __file__},
            "algorithm": {"ptx_coefficient": 0.1, "ptx_conversations": 1},
            "train": {"updates_per_step": 2},
        },
        "algorithm.ptx_conversations = 1",
        ["train.updates_per_step 2"],
    ),
    # Rows, memory and precision of the trainer.
    "sp": Misfit({"trainer": {"sequence_parallel": True}}, "trainer.sequence_parallel = True", ["trainer.tp > 1"]),
    "sft has no longest completion": Misfit(
        {"loop": "sft", "algorithm": {"aggregation": "constant_length"}},
        "algorithm.aggregation = constant_length",
        ["loop sft"],
    ),
    "a profile of no step": Misfit(
        {"train": {"steps": 10, "profile_steps": [2, 11, 30]}},
        "train.profile_steps = [2, 11, 30]",
        ["step 10", "[11, 30]"],
    ),
    "a profile of a CPU's memory": Misfit(
        {"train": {"profile_steps": [2], "profile_with": ["spans", "memory"]}, "cluster": {"device": "cpu"}},
        "train.profile_with = ['spans', 'memory']",
        ["leave out memory"],
    ),
    "critic's optimizer": Misfit(
        {"algorithm": PPO, "critic": {"optimizer": {"name": "sgd"}}},
        "critic.optimizer.name = sgd",
        ["trainer.distributed_optimizer=false"],
    ),
    "forward rows shorter than an update's": Misfit(
        {"trainer": {"max_tokens_per_microbatch": 64, "max_tokens_per_forward": 63}},
        "trainer.max_tokens_per_forward = 63",
        ["trainer.max_tokens_per_microbatch = 64", "to 64"],
    ),
    "microbatch": Misfit(
        {"trainer": {"max_tokens_per_microbatch": 63}},
        "trainer.max_tokens_per_microbatch = 63",
        ["data.max_prompt_tokens 40", "rollout.sampling.max_new_tokens 24", "to 64"],
    ),
    "microbatch, padded for sequence parallelism": Misfit(
        {
            "cluster": {"ranks_per_node": 2},
            "trainer": {"tp": 2, "max_tokens_per_microbatch": 65},
            "rollout": {"sampling": {"max_new_tokens": 25}},
        },
        "trainer.max_tokens_per_microbatch = 65",
        ["to 66"],
    ),
    "a reference without adapters": Misfit(
        {"algorithm": {"kl_coefficient": 0.1, "reference_update_steps": 4}, "lora": {"rank": 4}},
        "algorithm.reference_update_steps = 4",
        ["lora.rank = 4"],
    ),
    "microbatch, padded for context parallelism": Misfit(
        {
            "cluster": RANKS_4,
            "trainer": {"tp": 2, "cp": 2, "max_tokens_per_microbatch": 65},
            "rollout": {"sampling": {"max_new_tokens": 25}},
        },
        "trainer.max_tokens_per_microbatch = 65",
        ["to 72"],
    ),
    "too few microbatches for chunks": Misfit(
        {
            "cluster": RANKS_4,
            "trainer": {"pp": 2, "vpp": 3},
            "train": {"prompts_per_step": 2, "samples_per_prompt": 2, "updates_per_step": 2},
        },
        "trainer.vpp = 3",
        ["trainer.pp 2", "1 sequences", "vpp 1"],
    ),
    "experts": Misfit({"trainer": {"ep": 2}, "cluster": RANKS_4}, "trainer.ep = 2", ["qwen3"]),
    "no router": Misfit({"trainer": {"router_replay": True}}, "trainer.router_replay = True", ["qwen3"]),
    "nothing computed anew": Misfit(
        {"trainer": {"recompute": "selective", "recompute_modules": []}},
        "trainer.recompute_modules = []",
        ["trainer.recompute=none"],
    ),
    "experts computed anew": Misfit(
        {"trainer": {"recompute": "selective", "recompute_modules": ["mlp", "moe"]}},
        "trainer.recompute_modules = ['mlp', 'moe']",
        ["qwen3", "leave moe out"],
    ),
    "lora rank": Misfit({"lora": {"rank": 65}}, "lora.rank = 65", ["64"]),
    "adapters under a head": Misfit({"loop": "reward_model", "lora": {"rank": 8}}, "lora.rank = 8", ["lora.rank=0"]),
    "sgd": Misfit({"optimizer": {"name": "sgd"}}, "optimizer.name = sgd", ["trainer.distributed_optimizer=false"]),
    "adapters under Muon": Misfit(
        {"lora": {"rank": 8}, "optimizer": {"name": "muon"}}, "lora.rank = 8", ["optimizer.name=adam", "lora.rank=0"]
    ),
    "Muon on the host": Misfit(
        {"optimizer": {"name": "muon"}, "trainer": {"optimizer_offload_fraction": 0.5}, "model": {"dtype": "bfloat16"}},
        "trainer.optimizer_offload_fraction = 0.5",
        ["optimizer.name=adam"],
    ),
    "FP8 on a CPU": Misfit({"trainer": {"fp8": "blockwise"}}, "trainer.fp8 = blockwise", ["Transformer Engine"]),
    "a dispatcher without experts": Misfit(
        {"trainer": {"moe_dispatcher": "flex"}}, "trainer.moe_dispatcher = flex", ["qwen3"]
    ),
    "an optimizer of float32 on the host": Misfit(
        {"model": {"dtype": "float32"}, "trainer": {"optimizer_offload_fraction": 0.5}},
        "trainer.optimizer_offload_fraction = 0.5",
        ["model.dtype=bfloat16"],
    ),
    "an optimizer on the host that is not sharded": Misfit(
        {
            "model": {"dtype": "bfloat16"},
            "trainer": {"optimizer_offload_fraction": 0.5, "distributed_optimizer": False},
        },
        "trainer.optimizer_offload_fraction = 0.5",
        ["trainer.distributed_optimizer"],
    ),
    "an optimizer on the host that is offloaded too": Misfit(
        {"model": {"dtype": "bfloat16"}, "trainer": {"optimizer_offload_fraction": 0.5, "offload": ["optimizer"]}},
        "trainer.optimizer_offload_fraction = 0.5",
        ["trainer.offload includes optimizer"],
    ),
    "an optimizer of adapters on the host": Misfit(
        {"model": {"dtype": "bfloat16"}, "trainer": {"optimizer_offload_fraction": 0.5}, "lora": {"rank": 4}},
        "trainer.optimizer_offload_fraction = 0.5",
        ["lora.rank = 4"],
    ),
    "positions": Misfit(
        {"evaluation": {"sampling": {"max_new_tokens": 2009}}},
        "evaluation.sampling.max_new_tokens = 2009",
        ["data.max_prompt_tokens", "2048 positions", "at most 2008"],
    ),
    "minimum": Misfit(
        {"optimizer": {"learning_rate": 1e-6, "min_learning_rate": 1e-5}},
        "optimizer.min_learning_rate = 1e-05",
        ["optimizer.learning_rate 1e-06"],
    ),
    # Engines that could not do as they are asked, or would sample in another way than the trainer computes.
    "stop tokens beyond the vocabulary": Misfit(
        {"evaluation": {"sampling": {"stop_token_ids": [7, 431]}}},
        "evaluation.sampling.stop_token_ids = [7, 431]",
        ["415", "431"],
    ),
    "sampling masks": Misfit(
        {"rollout": {"vllm": {"return_sampling_mask": True}}},
        "rollout.vllm.return_sampling_mask = True",
        ["rollout.sampling.top_p", "rollout.sampling.top_k", "rollout.sampling.min_p"],
    ),
    "logits changed before sampling": Misfit(
        {"rollout": {"vllm": {"logits_processors": ["mine:MinP"]}}},
        "rollout.vllm.logits_processors = ['mine:MinP']",
        [],
    ),
    "log-probs of another distribution": Misfit(
        {"rollout": {"vllm": {"logprobs_mode": "raw_logprobs"}}},
        "rollout.vllm.logprobs_mode = raw_logprobs",
        ["processed_logprobs"],
    ),
    "fp8 of float32": Misfit(
        {"model": {"dtype": "float32"}, "rollout": {"quantization": "fp8"}},
        "rollout.quantization = fp8",
        ["model.dtype is float32", "model.dtype=bfloat16"],
    ),
    "fp8 in a kernel's own form": Misfit(
        {"rollout": {"quantization": "fp8", "vllm": {"linear_backend": "marlin"}}},
        "rollout.vllm.linear_backend = 'marlin'",
        ["rollout.quantization = fp8", "auto, triton, cutlass, deep_gemm, flashinfer_cutlass or torch"],
    ),
    "fp8 twice": Misfit(
        {"rollout": {"quantization": "fp8", "vllm": {"quantization": "fp8_per_tensor"}}},
        "rollout.vllm.quantization = 'fp8_per_tensor'",
        ["rollout.quantization"],
    ),
    "fp8 beside adapters in the engine": Misfit(
        {"rollout": {"quantization": "fp8", "vllm": {"enable_lora": True}}},
        "rollout.vllm.enable_lora = True",
        ["lora.rank"],
    ),
    "type of the cache": Misfit(
        {"rollout": {"vllm": {"kv_cache_dtype": "fp8"}}},
        "rollout.vllm.kv_cache_dtype = 'fp8'",
        ["rollout.kv_cache_dtype"],
    ),
    "rewards of single turns that are summed": Misfit(
        {"rollout": {"environment": "command", "agent": {"command": ["sh"], "credit": "by_turn"}}},
        "rollout.agent.credit = by_turn",
        ["algorithm.advantage = grpo", "algorithm.turn_discount"],
    ),
    # The policy as its own teacher, and prompts that only a teacher reads.
    "a teacher equal to the policy": Misfit(
        {**DISTILLED, "distillation": {"teacher": "policy"}}, "distillation.teacher = policy", ["teacher_prompt"]
    ),
    "a reference that reads the same": Misfit(
        {**DISTILLED, "distillation": {"teacher": "reference", "teacher_prompt": "{prompt}"}},
        "distillation.teacher = reference",
        ["distillation.teacher_prompt", "distillation.context"],
    ),
    "sizes of a teacher without a folder": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "tp": 1}}, "distillation.tp", ["distillation.teacher = policy"]
    ),
    "a teacher without the question": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "teacher_prompt": "{context}"}},
        "distillation.teacher_prompt = '{context}'",
        ["{prompt}"],
    ),
    "a context that is not read": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "teacher_prompt": "Well: {prompt}"}},
        "distillation.teacher_prompt = 'Well: {prompt}'",
        ["{context}", "distillation.context"],
    ),
    "no context to read": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": []}},
        "distillation.teacher_prompt = '{prompt} {context}'",
        ["distillation.context", "[record.solution]"],
    ),
    "another name in a template": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "teacher_prompt": "{prompt} {context} {hint}"}},
        "distillation.teacher_prompt = '{prompt} {context} {hint}'",
        ["{hint}", "{prompt} or {context}"],
    ),
    "an unknown context": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": ["solution"]}},
        "distillation.context = solution",
        ["success", "feedback", "record.NAME"],
    ),
    "a context given twice": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": ["record.gt_answer", "record.gt_answer"]}},
        "distillation.context = ['record.gt_answer', 'record.gt_answer']",
        ["record.gt_answer twice"],
    ),
    "a lone success": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": ["success"]}, "train": {"samples_per_prompt": 1}},
        "train.samples_per_prompt = 1",
        ["distillation.context success", "2 or more"],
    ),
    "success without a judge": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": ["success"]}, "reward": {"functions": []}},
        "reward.functions is empty",
        ["distillation.context success"],
    ),
    "feedback of no environment": Misfit(
        {**DISTILLED, "distillation": {**TAUGHT, "context": ["feedback"]}},
        "rollout.environment = single_turn",
        ["distillation.context feedback"],
    ),
    "a teacher that reads more than a row": Misfit(
        {
            **DISTILLED,
            "distillation": {**TAUGHT, "max_teacher_tokens": 900},
            "trainer": {"max_tokens_per_microbatch": 512},
        },
        "trainer.max_tokens_per_forward = 512",
        ["distillation.max_teacher_tokens 900", "raise it to 900"],
    ),
    # Engines that cannot receive adapters in place of merged weights.
    "adapters beside fp8": Misfit(
        {"rollout": {"quantization": "fp8"}, "lora": ADAPTER},
        "lora.sync = adapter",
        ["rollout.quantization = fp8", "lora.sync=merged"],
    ),
    "adapters sent in the background": Misfit(
        {
            "weights": {"overlap": True},
            "rollout": {"placement": "separate", "ranks": 1, "max_staleness": 1},
            "cluster": {"ranks_per_node": 2},
            "algorithm": {"importance_sampling": "tis"},
            "lora": ADAPTER,
        },
        "lora.sync = adapter",
        ["weights.overlap=false"],
    ),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_a_misfit_is_one_error_with_field_and_value(only_fault: Callable[..., str], misfit: Misfit) -> None:
    line = only_fault(**misfit.changed)
    assert line.startswith(f"{misfit.place}:"), line
    assert [fact for fact in misfit.facts if fact not in line] == [], line
