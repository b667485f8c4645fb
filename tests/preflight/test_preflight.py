from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import load_tokenizer
from megarl.preflight import check, check_rewards, count_records, resource_warnings, shortened_warmups
from megarl.preflight.engine import runs_on_cpu
from megarl.preflight.files import read_problems, system_prompt
from megarl.preflight.library_fields import accepts, supported_head_sizes
from megarl.rewards import SYSTEM_PROMPTS
from megarl.types import ConfigError, DataError

RECORD = {"messages": {"role": "user", "content": "1 + 2"}, "gt_answer": "3"}


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Callable[..., Path]) -> Callable[..., Recipe]:
    """`recipe(trainer={"tp": 2}, ...)`: a sound recipe for a small model, with sections changed."""
    model = tiny_model(num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=32, intermediate_size=96, num_layers=6)
    train = tmp_path / "train.jsonl"
    train.write_text(f"{json.dumps(RECORD)}\n" * 3)

    def make(**changed: Any) -> Recipe:
        sections: dict[str, Any] = {
            "name": "small",
            "loop": "rl",
            "model": {"path": str(model)},
            "data": {"train": str(train), "max_prompt_tokens": 40},
            "rollout": {"sampling": {"max_new_tokens": 24}},
        }
        for name, value in changed.items():
            merge = isinstance(value, Mapping) and name in sections
            sections[name] = sections[name] | value if merge else value
        return Recipe.model_validate(sections)

    return make


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


PPO = {"preset": "ppo"}
RANKS_4 = {"ranks_per_node": 4}
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
        {"algorithm": {"importance_sampling": "icepop", "importance_sampling_low": 3.0}},
        ["algorithm.importance_sampling_low = 3.0: set it below algorithm.importance_sampling_high = 2.0"],
        id="icepop",
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
        {
            "data": {"ptx": __file__},
            "algorithm": {"ptx_coefficient": 0.1},
            "rollout": {"sampling": {"max_new_tokens": 24, "temperature": 0.7}},
        },
        ["rollout.sampling.temperature = 0.7", "use 1.0"],
        id="conversations at another temperature",
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
        {"rollout": {"sampling": {"max_new_tokens": 24, "top_p": 0.7}}},
        ["rollout.sampling.top_p = 0.7", "0.35 nats", "leave it out", "evaluation.sampling.top_p"],
        id="nucleus of the rollout",
    ),
    pytest.param(
        {"rollout": {"sampling": {"max_new_tokens": 24, "top_k": 20}}},
        ["rollout.sampling.top_k = 20", "the trainer's of all", "leave it out", "evaluation.sampling.top_k"],
        id="top k of the rollout",
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
    pytest.param({"lora": {"rank": 65}}, ["lora.rank = 65: exceeds", "narrowest matrix, 64; lower it"], id="lora rank"),
    pytest.param(
        {"loop": "reward_model", "lora": {"rank": 8}}, ["lora.rank = 8", "set lora.rank=0"], id="adapters under a head"
    ),
    pytest.param({"optimizer": {"name": "sgd"}}, ["trainer.distributed_optimizer=false"], id="sgd"),
    pytest.param(
        {"evaluation": {"sampling": {"max_new_tokens": 2009}}},
        ["evaluation.sampling.max_new_tokens = 2009", "2048 positions; use at most 2008"],
        id="positions",
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
    ],
)
def test_the_limits_themselves_are_allowed(recipe: Callable[..., Recipe], changed: dict[str, Any]) -> None:
    assert check(recipe(**changed)).world_size == 1


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


@pytest.mark.parametrize(
    ("field", "size"),
    [
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("intermediate_size", -96),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", True),
        ("vocab_size", 10**12),
        ("max_position_embeddings", 0),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_a_rank_starts(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path, field: str, size: object
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: size}))
    with pytest.raises(DataError, match=rf"config\.json: {field} is {size!r}; it must be a whole number from 1 to"):
        check(recipe(model={"path": str(folder)}))


def with_value_head(model: Path, target: Path) -> Path:
    """A reward model's folder made of a language model's."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "good"}}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    tensors["score.weight"] = np.ones((1, config["hidden_size"]), np.float32)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, target / "model.safetensors"
    )
    return target


def test_the_models_beside_the_policy_are_looked_at(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    language = str(tiny_model())
    reward = str(with_value_head(tiny_model(), tmp_path / "reward"))
    assert check(recipe(reward={"model": reward}, algorithm=PPO, critic={"path": language})).world_size == 1
    other = str(shutil.copytree(tiny_model(), tmp_path / "other"))
    tokenizer = (tmp_path / "other/tokenizer.json").read_text()
    (tmp_path / "other/tokenizer.json").write_text(tokenizer.replace('"<|im_end|>"', '"<|end|>"'))
    experts = str(tiny_model(family="qwen3_moe", num_layers=6, num_kv_heads=2))
    for changed, told in (
        ({"reward": {"model": language}}, f"reward.model = {language}: is a language model; give one that was trained"),
        ({"algorithm": PPO, "critic": {"path": other}}, f"critic.path = {other}: its tokenizer is not the policy's"),
        ({"algorithm": PPO, "critic": {"path": experts}}, "must both have experts, or neither"),
        ({"model": {"path": reward}}, f"model.path = {reward}: is a reward model, which has no words"),
        (
            {"algorithm": PPO, "critic": {"path": language}, "cluster": RANKS_4, "trainer": {"pp": 3}},
            f"critic.path = {language}: trainer.pp = 3",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check(recipe(**changed))
        assert told in str(caught.value)
    with pytest.raises(DataError, match=r"reward\.model: absent: model folder not found"):
        check(recipe(reward={"model": "absent"}))
    assert check(recipe(loop="reward_model", model={"path": reward})).world_size == 1


def test_records_are_counted_by_file(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(RECORD) + "\n\n" + json.dumps(RECORD) + "\n")
    assert count_records(recipe(data={"validation": {"easy": str(held_out)}})) == {"train": 3, "easy": 2}
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"prompt": "1 + 2", "response": "3"}) + "\n")
    beside = {"ptx": str(talk), "validation_conversations": {"talk": str(talk)}}
    assert count_records(recipe(data=beside)) == {"train": 3, "ptx": 1, "talk (conversations)": 1}


def test_the_first_faulty_line_of_each_file_is_told(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(RECORD) + "\n{broken\n")
    with pytest.raises(DataError) as caught:
        count_records(recipe(loop="sft", data={"validation": {"easy": str(held_out)}}))
    title, *lines = str(caught.value).splitlines()
    assert title == "data of recipe small: 2 errors"
    assert "train.jsonl, line 1: no message is the assistant's" in lines[0]
    assert "held_out.jsonl, line 2: not JSON" in lines[1]


OWN_REWARDS = """
import time
from megarl.types import Reward


def right(completion_text, answer, correct_score):
    assert completion_text == answer == "3"
    return Reward(correct_score, True, True)


def of_trl(completions, **kwargs):
    return [0.0 for _ in completions]


def a_list(**kwargs):
    return [0.0] * (kwargs["num_tokens"] > 0 and "messages" in kwargs["record"])


def raises(completion_text, answer, correct_score):
    raise ValueError("no such grader")


def hangs(completion_text, answer, correct_score):
    time.sleep(600)


def huge(completion_text, answer, correct_score):
    return Reward(1e300, True, True)
"""


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    (tmp_path / "own_rewards_of_preflight.py").write_text(OWN_REWARDS)
    monkeypatch.chdir(tmp_path)
    return "own_rewards_of_preflight"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        pytest.param(
            "of_trl", ["its parameter completions is not known. Did you mean completion_text?"], id="signature of TRL"
        ),
        pytest.param("a_list", ["returned [0.0], not a number, None or a megarl.types.Reward"], id="a list"),
        pytest.param("raises", ["first record", "gold answer '3'", "ValueError: no such grader"], id="raises"),
        pytest.param("hangs", ["took more than reward.wall_timeout_seconds = 0.5 by the clock"], id="hangs"),
        pytest.param("huge", ["returned a score outside -1e+06 to 1e+06"], id="1e300"),
        pytest.param("rihgt", ["has no function 'rihgt'; did you mean 'right'"], id="no function"),
    ],
)
def test_a_reward_function_that_cannot_work_is_refused(
    recipe: Callable[..., Recipe], own_rewards: str, function: str, told: list[str]
) -> None:
    given = {"functions": [f"{own_rewards}:{function}"], "wall_timeout_seconds": 0.5 if function == "hangs" else 60.0}
    with pytest.raises(ConfigError) as caught:
        check_rewards(recipe(reward=given))
    for words in (f"{own_rewards}:{function}", *told):
        assert words in str(caught.value)
    if not function.startswith("rihgt"):
        assert f"def {function}(completion_text: str, answer: str) -> float" in str(caught.value)


def test_all_reward_functions_at_fault_are_told_at_once(
    recipe: Callable[..., Recipe], own_rewards: str, tmp_path: Path
) -> None:
    (tmp_path / "ends_on_import_of_preflight.py").write_text("import os\nprint('goodbye', flush=True)\nos._exit(4)\n")
    functions = ["absent_module:f", f"{own_rewards}:right", "ends_on_import_of_preflight:f"]
    with pytest.raises(ConfigError) as caught:
        check_rewards(recipe(reward={"functions": functions}))
    title, *lines = str(caught.value).splitlines()
    assert title == "rewards of recipe small: 2 errors"
    assert "cannot import absent_module: ModuleNotFoundError" in lines[0]
    assert "ended with exit code 4" in lines[1] and "goodbye" in lines[2]


@pytest.mark.parametrize(
    ("given", "functions", "expected"),
    [
        (None, ["boxed"], None),
        ("none", ["boxed"], None),
        ("Be brief.", ["boxed"], "Be brief."),
        ("default", ["a.b:c", "think_answer_tags", "boxed"], SYSTEM_PROMPTS["think_answer_tags"]),
    ],
)
def test_system_prompts(
    recipe: Callable[..., Recipe], given: str | None, functions: list[str], expected: str | None
) -> None:
    made = recipe(data={"system_prompt": given, "max_prompt_tokens": 400}, reward={"functions": functions})
    assert system_prompt(made) == expected
    shown = read_problems(made, load_tokenizer(made.model.path), made.data.train)[0].messages[0]
    assert (shown["role"], shown["content"]) == ("system", expected) if expected else shown["role"] == "user"


def test_one_sample_a_prompt_is_sound_where_it_keeps_its_reward(recipe: Callable[..., Recipe]) -> None:
    check(recipe(train={"samples_per_prompt": 1}, algorithm={"lone_sample": "reward"}))


def test_no_default_system_prompt_is_an_error(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt = default: .*a\.b:c has none"):
        system_prompt(recipe(data={"system_prompt": "default"}, reward={"functions": ["a.b:c"]}))


def test_reward_functions_that_work_are_accepted(recipe: Callable[..., Recipe], own_rewards: str) -> None:
    check_rewards(recipe(reward={"functions": ["boxed", f"{own_rewards}:right"]}))
    check_rewards(recipe(loop="sft", reward={"functions": ["absent_module:f"]}))


def test_a_token_beyond_the_vocabulary(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    sound = recipe()
    folder = shutil.copytree(sound.model.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 5}))
    with pytest.raises(DataError, match=rf"has the id \d+, but config.json's vocab_size {config['vocab_size'] - 5}"):
        check(recipe(model={"path": str(folder)}))


@pytest.mark.parametrize("loop", ["sft", "preference", "reward_model"])
def test_lengths_of_completions_do_not_matter_where_nothing_is_sampled(
    recipe: Callable[..., Recipe], tmp_path: Path, loop: str
) -> None:
    """Their fields do nothing there, so that nobody could lower them."""
    folder = shutil.copytree(recipe().model.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    assert check(recipe(loop=loop, model={"path": str(folder)})).world_size == 1
    with pytest.raises(
        ConfigError, match=r"rollout\.sampling\.max_new_tokens = 24: exceeds with data\.max_prompt_tokens"
    ):
        check(recipe(model={"path": str(folder)}))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a folder's only file."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda t: t.pop(NORM), [f"tensor {NORM} is missing"], id="missing"),
        pytest.param(
            lambda t: t.update(other=np.zeros(3, np.float32)), ["other has no place in a qwen3 model"], id="extra"
        ),
        pytest.param(
            lambda t: t.update({NORM: np.zeros(3, np.float32)}), [f"{NORM} is (3,); config.json says (64,)"], id="shape"
        ),
        pytest.param(lambda t: t.update({NORM: np.zeros(64, np.int8)}), [f"{NORM} is I8; only F64, F32"], id="type"),
        pytest.param(
            lambda t: [t.pop(name) for name in [*t] if "_layernorm" in name or name == "model.norm.weight"],
            ["tensor model.layers.0.input_layernorm.weight is missing", "and 8 more tensors like these (missing)"],
            id="many",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    recipe: Callable[..., Recipe], tmp_path: Path, change: Callable[[dict[str, Any]], Any], told: list[str]
) -> None:
    """From the headers of the files, before anything is started."""
    folder = shutil.copytree(recipe().model.path, tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(DataError) as caught:
        check(recipe(model={"path": str(folder)}))
    assert all(text in str(caught.value) for text in told), caught.value


MODEL_FIELDS = [
    pytest.param(
        {"trainer": {"megatron": {"recompute_granularty": "full"}}},
        [
            "trainer.megatron.recompute_granularty: Megatron-Core's TransformerConfig has no such field",
            "did you mean recompute_granularity?",
        ],
        id="Megatron, unknown",
    ),
    pytest.param(
        {"trainer": {"megatron": {"hidden_dropout": "none"}}},
        ["trainer.megatron.hidden_dropout = 'none'", "says float"],
        id="Megatron, type",
    ),
    pytest.param(
        {"trainer": {"megatron": {"moe_permute_fusion": 1}}},
        ["moe_permute_fusion = 1", "says bool"],
        id="Megatron, bool",
    ),
    pytest.param(
        {"trainer": {"megatron": {"recompute_granularity": "half"}}},
        ["recompute_granularity = 'half'", "Literal['full', 'selective']"],
        id="Megatron, literal",
    ),
    pytest.param(
        {"trainer": {"megatron": {"num_layers": 4}}},
        ["num_layers = 4: follows from the model's"],
        id="Megatron, decided",
    ),
    pytest.param(
        {"trainer": {"megatron": {"adam_beta1": 0.9}}},
        ["trainer.megatron.adam_beta1 = 0.9: is a field of Megatron-Core's OptimizerConfig"],
        id="Megatron, the optimizer's",
    ),
    pytest.param(
        {"rollout": {"vllm": {"block_sise": 16}}},
        ["rollout.vllm.block_sise = 16: vLLM's EngineArgs has no such field", "did you mean block_size?"],
        id="vLLM, unknown",
    ),
    pytest.param(
        {"rollout": {"vllm": {"block_size": "16"}}},
        ["rollout.vllm.block_size = '16'", "says int | None"],
        id="vLLM, type",
    ),
    pytest.param(
        {"rollout": {"vllm": {"max_num_seqs": 8}}},
        ["rollout.vllm.max_num_seqs: set rollout.max_concurrent_requests instead"],
        id="vLLM, decided",
    ),
]


@pytest.mark.parametrize(("changed", "parts"), MODEL_FIELDS)
def test_fields_of_the_libraries_are_checked(
    recipe: Callable[..., Recipe], changed: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(recipe(**changed))
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error"
    assert all(part in line for part in parts), line


def test_fields_of_the_libraries_that_fit(recipe: Callable[..., Recipe]) -> None:
    megatron = {"hidden_dropout": 0, "recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    vllm = {"block_size": 64, "enforce_eager": True, "gpu_memory_utilization": 0.5, "quantization": None}
    check(recipe(trainer={"megatron": megatron}, rollout={"vllm": vllm}))


@pytest.mark.parametrize(
    ("annotation", "fitting", "others"),
    [
        pytest.param("int", [1, 0, None], [True, 1.0, "1"], id="int"),
        pytest.param("float", [1, 1.5], [True, "1.5"], id="float"),
        pytest.param("Optional[Union[int, List[int]]]", [1, [1, 2]], ["1", [1, "2"]], id="union"),
        pytest.param("'dict[str, Any] | None'", [{"a": 1}], [1], id="text"),
        pytest.param("Literal['a', 'b'] | None", ["a"], ["c", 1], id="literal"),
        pytest.param("CacheDType", [1, "x"], [], id="not simple"),
    ],
)
def test_values_against_annotations(annotation: str, fitting: list[Any], others: list[Any]) -> None:
    parsed = ast.parse(annotation, mode="eval").body
    assert [accepts(parsed, value) for value in fitting] == [True] * len(fitting)
    assert [accepts(parsed, value) for value in others] == [False] * len(others)


def test_a_vocabulary_that_the_engines_cannot_split(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(num_heads=6, num_kv_heads=3, hidden_size=96, head_dim=32, intermediate_size=96, vocab_size=433)
    ranks = {"cluster": {"ranks_per_node": 3}, "train": {"prompts_per_step": 33}}
    with pytest.raises(ConfigError, match=r"rollout.tp = 3: does not divide the model's 448 rows of the vocabulary"):
        check(recipe(model={"path": str(model)}, rollout={"tp": 3, "sampling": {"max_new_tokens": 24}}, **ranks))


def test_head_sizes_of_attention_on_cpu(recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model(num_heads=4, num_kv_heads=2, head_dim=24, num_layers=2))
    if not runs_on_cpu():
        pytest.skip("this vLLM is not the build for CPUs")
    with pytest.raises(ConfigError, match=r"model.path = .*: its attention heads have 24 channels, .* takes 32, 64"):
        check(recipe(model={"path": model}))
    assert 128 in supported_head_sizes()


def test_a_cache_that_holds_no_sequence_says_what_it_needs(recipe: Callable[..., Recipe]) -> None:
    """Two of 6 layers * 2 heads * 32 channels * 2 bytes are 1,536 a token; 64 tokens and vLLM's own block."""
    small = {"rollout": {"kv_cache_gib": 0.00005, "sampling": {"max_new_tokens": 24}}}
    with pytest.raises(ConfigError) as caught:
        check(recipe(**small))
    told = str(caught.value)
    assert "rollout.kv_cache_gib = 5e-05: holds" in told and "one sequence of" in told and "has 64;" in told
    needed = re.search(r"give at least ([0-9.e-]+),", told)
    assert needed is not None
    block = 32 if runs_on_cpu() else 16
    assert float(needed[1]) == pytest.approx((64 + block) * 2 * 6 * 2 * 32 * 2 / 2**30, rel=0.02)
    small["rollout"]["kv_cache_gib"] = float(needed[1])
    check(recipe(**small))


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_job_for_other_machines_is_checked_on_this_one(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    made = recipe(cluster={"launcher": launcher, "nodes": 2, "ranks_per_node": 2})
    layout = check(made, is_start=False)
    assert layout.world_size == 4
    with pytest.raises(ConfigError, match="megarl slurm submit"):
        check(made)
    told = list(resource_warnings(made, layout))
    assert (told == []) if launcher == "slurm" else ("megarl slurm submit runs it" in told[0])


def test_a_runs_folder_that_cannot_be_made(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_folder = .*file/runs: nothing can be written in .*file "):
        check(recipe(runs_folder=str(tmp_path / "file/runs")))
    check(recipe(runs_folder=str(tmp_path / "new/runs")))
    assert not (tmp_path / "new").exists() and [path.name for path in tmp_path.iterdir()].count("file") == 1


def test_too_many_ranks_for_this_machine_are_a_warning(recipe: Callable[..., Recipe]) -> None:
    few, many = recipe(), recipe(cluster={"ranks_per_node": 1000}, train={"prompts_per_step": 1000})
    assert list(resource_warnings(few, check(few))) == []
    cores, *memory = resource_warnings(many, check(many))
    assert cores.startswith("cluster.ranks_per_node = 1000: this machine has ")
    if runs_on_cpu() and os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < 400 << 30:
        assert "the ranks need at least" in memory[0]


def test_a_warm_up_longer_than_the_run_is_held_to_it(recipe: Callable[..., Recipe]) -> None:
    long = recipe(optimizer={"warmup_steps": 21}, train={"steps": 10, "updates_per_step": 2})
    check(long)
    assert [*shortened_warmups(long)] == ["optimizer.warmup_steps = 21: the run makes 20 updates; 20 used"]
    assert [
        *shortened_warmups(recipe(optimizer={"warmup_steps": 20}, train={"steps": 10, "updates_per_step": 2}))
    ] == []


def test_a_run_of_no_steps_needs_something_to_evaluate(recipe: Callable[..., Recipe]) -> None:
    sound = recipe()
    with pytest.raises(ConfigError, match=r"train\.steps = 0: only evaluates, but data\.validation is not given"):
        check(recipe(train={"steps": 0}))
    check(recipe(train={"steps": 0}, data={"validation": {"held_out": sound.data.train}}))
