"""A recipe with 30 faults of all kinds is answered with one page: each with its field, its value and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.config import Recipe
from megarl.config.recipe import load as read
from megarl.config.recipe import to_yaml
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.predictions import table_of
from megarl.planner.search import with_field_values
from megarl.planner.sizes import parallel_of
from megarl.preflight import check, load
from megarl.types import ConfigError

RECIPE = """
loop: rl
seed: true
runs_folder: ${{model.pth}}/runs
model: {{path: {model}, dtype: float16}}
data:
  train: {data}/absent.jsonl
  validation: {{easy: {data}/empty.jsonl, a/b: x.jsonl}}
  max_prompt_tokens: 40
  train_batch_size: 256
cluster: {{ranks_per_node: 4, min_bandwidth_fraction: 1.5}}
trainer: {{tp: 3, tpp: 2, megatron: {{hidden_dropout: none}}}}
lora: {{alpha: 16}}
optimizer: {{lr: 1e-6, betas: [0.9, 1.5]}}
rollout:
  tp: 3
  sampling: {{max_new_tokens: 24, top_p: 2, temperature: 0}}
  vllm: {{block_sise: 16, hf_token: geheim}}
reward: {{functions: [bxed]}}
algorithm:
  policy_loss: sapo
  policy_loss_kwargs: {{temperature_positiv: 2.0}}
  gamma: 0.9
  clip_low: 0.1
  kl_estimator: k9
  overlong_buffer: 24
preference: {{beta: 0.2}}
critic: {{clip: 0.1}}
train: {{steps: many, prompts_per_step: 32}}
weights: {{bucket_mib: 1:30}}
checkpoint: null
"""

EXPECTED = {
    "weights.bucket_mib = 1:30": "write 90",
    "runs_folder": "Set it here or as runs_folder=VALUE",
    "rollout.vllm.hf_token = <hidden>": "refer to it by the name of an environment variable",
    "name": "missing; add it",
    "seed = True": "is true or false",
    "model.dtype = 'float16'": "must be 'float32' or 'bfloat16'",
    "data.validation.a/b": "use letters, digits",
    "data.train_batch_size = 256": "here it is train.prompts_per_step",
    "cluster.min_bandwidth_fraction = 1.5": "must be less than 1",
    "trainer.tpp = 2": "did you mean trainer.tp?",
    "optimizer.lr = 1e-06": "here it is optimizer.learning_rate",
    "optimizer.betas.1 = 1.5": "must be less than 1",
    "rollout.sampling.top_p = 2": "must be less than or equal to 1",
    "algorithm.kl_estimator = 'k9'": "must be 'k1', 'k2', 'k3' or 'absolute'",
    "train.steps = 'many'": "must be a valid integer",
    "checkpoint = None": "leave it out",
    "lora.alpha = 16.0": "set lora.rank above 0",
    "algorithm.gamma = 0.9": "set algorithm.advantage to gae",
    "algorithm.clip_low = 0.1": "set algorithm.policy_loss to clipped",
    "critic.clip = 0.1": "set algorithm.advantage to gae",
    "preference.beta = 0.2": "set loop to preference",
    "rollout.vllm.block_sise = 16": "did you mean block_size?",
    "trainer.tp = 3, trainer.pp = 1": "make tp * pp 1, 2 or 4",
    "rollout.tp = 3": "use 1, 2 or 4, or have 3 or 6 ranks",
    "rollout.sampling.temperature = 0": "use 1.0",
    "reward.functions": "Did you mean 'boxed'?",
    "algorithm.overlong_buffer = 24": "use fewer tokens",
    "algorithm.policy_loss_kwargs.temperature_positiv = 2.0": "did you mean temperature_positive?",
    "trainer.megatron.hidden_dropout = 'none'": "give a value of that type",
    "absent.jsonl": "check the path",
}
"""The beginning of a line, and its remedy."""


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    sizes = {"num_heads": 12, "num_kv_heads": 3, "hidden_size": 96, "head_dim": 32, "intermediate_size": 96}
    return tiny_model(**sizes, num_layers=6, vocab_size=570)


def test_thirty_faults_make_one_page(tmp_path: Path, model: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model, data=tmp_path))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "recipe.yaml")
    title, *lines = str(caught.value).splitlines()
    assert len(EXPECTED) == 30
    assert title == f"{tmp_path / 'recipe.yaml'}: 30 errors"
    assert len(lines) == 30
    assert "geheim" not in str(caught.value)
    for start, remedy in EXPECTED.items():
        found = [line for line in lines if line.strip().removeprefix(f"{tmp_path}/").startswith(start)]
        assert len(found) == 1, (start, lines)
        assert remedy in found[0], found[0]


def test_what_depends_on_a_field_that_cannot_be_read_is_not_guessed(tmp_path: Path, model: Path) -> None:
    """With its default, tp would not fit the ranks, gamma would do nothing, and no batch would divide."""
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"messages": {"role": "user", "content": "1 + 2"}, "gt_answer": "3"}) + "\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
name: x
loop: rl
model: {{path: {model}}}
data: {{train: {tmp_path}/train.jsonl, max_prompt_tokens: 40}}
cluster: {{ranks_per_node: 3}}
trainer: {{tp: three}}
rollout: {{sampling: {{max_new_tokens: 24}}}}
algorithm: {{advantage: gea, gamma: 0.9}}
train: {{prompts_per_step: 16, samples_per_prompt: 4}}
"""
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    _, *lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines] == ["trainer.tp = 'three'", "algorithm.advantage = 'gea'"]
    assert "did you mean 'gae'?" in lines[1]
    path.write_text(path.read_text().replace("three", "3").replace("gea", "gae"))
    assert check(load(path)).tp == 3


def test_faults_of_the_loop_leave_what_depends_on_it_untold(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nloop: rll\nmodel: {path: absent}\ndata: {train: t}\npreference: {beta: 0.2}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    _, *lines = str(caught.value).splitlines()
    assert [line.strip().partition(":")[0] for line in lines] == ["loop = 'rll'", "absent", "t"]


def test_memory_is_checked_with_the_choices_of_a_start(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A recipe that cannot be read in full leaves offloading to the planner as well."""
    small = recipe(rollout={"kv_cache_gib": 8}, cluster={"gpu_memory_gib": 80})

    def taken_gib(*states: str) -> float:
        held = with_field_values(small, {"trainer.offload": states})
        return table_of(held, parallel_of(held)).fullest.device_bytes / 2**30

    gpu_gib = (taken_gib() + taken_gib("optimizer", "gradients", "parameters")) / 2
    resident = with_field_values(small, {"trainer.offload": (), "cluster.gpu_memory_gib": gpu_gib})
    with pytest.raises(ConfigError, match="too much"):
        check(resident, is_start=False)
    path = tmp_path / "small.yaml"
    written = {"trainer": {"max_tokens_per_microbatch": 8192}, "cluster": {"gpu_memory_gib": gpu_gib}}
    sections = yaml.safe_load(to_yaml(small)) | written
    path.write_text(yaml.safe_dump(sections))
    assert check(with_memory_defaults(read(path)), is_start=False)
    with pytest.raises(ConfigError) as caught:
        load(path, ["trainer.tpp=2"], is_start=False)
    (line,) = str(caught.value).splitlines()[1:]
    assert "trainer.tpp = 2" in line
