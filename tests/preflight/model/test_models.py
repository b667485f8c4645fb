"""Model folders: sizes, tensors, vocabulary, and the models beside the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.families.shape import planned_shape, read_model_shape
from megarl.planner.sizes import row_multiple
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight import check
from megarl.preflight.libraries.library_fields import supported_head_sizes
from megarl.preflight.memory.resources import warn_of_latent_norms
from megarl.types import ConfigError, DataError
from tests.checkpoint.model_folders import vision_folder

PPO = {"preset": "ppo"}


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


def test_the_constant_of_latent_norms_is_said(recipe: Callable[..., Recipe]) -> None:
    flash, deepseek = (
        list(warn_of_latent_norms(made, planned_shape(made.model.folder)))
        for made in (recipe(model={"path": f"models/{name}"}) for name in ("GLM-4.7-Flash", "DeepSeek-V3"))
    )
    [text] = flash
    assert "model.path = models/GLM-4.7-Flash" in text and "rms_norm_eps = 1e-05" in text and "1e-06" in text
    assert deepseek == []


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
        ({"reward": {"model": language}}, f"reward.model = {language}: is a language model; give a model trained"),
        ({"algorithm": PPO, "critic": {"path": other}}, f"critic.path = {other}: its tokenizer is not the policy's"),
        ({"algorithm": PPO, "critic": {"path": experts}}, "must both have experts, or neither"),
        ({"model": {"path": reward}}, f"model.path = {reward}: is a reward model without a language head"),
        (
            {"algorithm": PPO, "critic": {"path": language}, "cluster": {"ranks_per_node": 5}, "trainer": {"pp": 5}},
            f"critic.path = {language}: trainer.pp = 5",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check(recipe(**changed))
        assert told in str(caught.value)
    with pytest.raises(DataError, match=r"reward\.model: absent: model folder not found"):
        check(recipe(reward={"model": "absent"}))
    assert check(recipe(loop="reward_model", model={"path": reward})).world_size == 1


def test_value_heads_of_checkpoints_with_a_vision_tower_are_refused(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The export would name a language model, and a later run would miss its output head."""
    folder = vision_folder(tmp_path / "vision", tokenizer=Path(recipe().model.path))
    refused = "Qwen3_5ForConditionalGeneration with a value head (critic, reward model) is not supported"
    for field, changed in (
        ("model.path", {"loop": "reward_model", "model": {"path": str(folder)}}),
        ("model.path", {"algorithm": PPO, "model": {"path": str(folder)}}),
        ("critic.path", {"algorithm": PPO, "critic": {"path": str(folder)}}),
    ):
        with pytest.raises(ConfigError) as caught:
            check(recipe(**changed))
        assert f"{field} = {folder}: {refused}; use a text model, Qwen3_5ForCausalLM." in str(caught.value)
        assert str(caught.value).count(refused) == 1
    with pytest.raises(DataError, match="with a value head"):
        read_model_shape(folder).with_value_head()


def test_a_token_beyond_the_vocabulary(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    sound = recipe()
    folder = shutil.copytree(sound.model.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 5}))
    with pytest.raises(
        DataError, match=rf"has the id \d+, but vocab_size in config.json is {config['vocab_size'] - 5}"
    ):
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
    with pytest.raises(ConfigError, match=r"model.path = .*: its attention heads have 24 channels, .* supports 32, 64"):
        check(recipe(model={"path": model}))
    assert 128 in supported_head_sizes()


def test_products_in_fp8_need_whole_blocks(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.preflight.model.model_sizes.runs_on_cpu", lambda: False)
    monkeypatch.setattr("megarl.platform.transformer_engine.is_installed", lambda: True)
    sizes: dict[str, Any] = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "num_layers": 2}
    ranks: Any = {"cluster": {"ranks_per_node": 2}, "trainer": {"fp8": "blockwise", "tp": 2}}
    check(made := recipe(model={"path": str(tiny_model(**sizes, intermediate_size=512))}, **ranks))
    # A row is cut into two parts, each made of whole blocks.
    assert row_multiple(made) == 2 * 128
    narrow = {"path": str(tiny_model(**sizes, intermediate_size=384))}
    with pytest.raises(ConfigError, match=r"fp8 = blockwise: the model's 192 channels of the feed-forward layer on a "):
        check(recipe(model=narrow, **ranks))
    whole = {"path": str(tiny_model(**sizes, intermediate_size=512)), "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"fp8 = blockwise: needs bfloat16 weights; set model.dtype=bfloat16"):
        check(recipe(model=whole, **ranks))
    given = ranks["trainer"] | {"megatron": {"fp8_recipe": "tensorwise"}}
    with pytest.raises(
        ConfigError, match=r"trainer.megatron.fp8_recipe = 'tensorwise': megarl sets this from trainer.fp8"
    ):
        check(recipe(model=made.model.model_dump(), cluster=ranks["cluster"], trainer=given))


@pytest.mark.parametrize("fault", [None, "it is not installed"])
def test_tokens_reach_other_ranks_by_deep_ep_where_it_can_be_used(
    recipe: Callable[..., Recipe],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: str | None,
) -> None:
    monkeypatch.setattr("megarl.preflight.model.model_sizes.deep_ep_fault", lambda: fault)
    model = {"path": str(tiny_model(family="qwen3_moe", num_heads=4, num_kv_heads=2, head_dim=32))}
    ranks: Any = {"model": model, "cluster": {"ranks_per_node": 2}}
    made = recipe(**ranks, trainer={"moe_dispatcher": "flex", "ep": 2})
    if fault is None:
        check(made)
    else:
        with pytest.raises(ConfigError, match=r"moe_dispatcher = flex: DeepEP cannot be used \(it is not installed\)"):
            check(made)
    with pytest.raises(
        ConfigError, match=r"moe_dispatcher = flex: with trainer.ep and trainer.etp 1, each rank has all experts"
    ):
        check(recipe(**ranks, trainer={"moe_dispatcher": "flex"}))


@pytest.mark.parametrize(("is_cpu", "has_engine"), [(True, True), (False, False), (False, True)])
def test_activations_of_experts_are_computed_anew_by_transformer_engine(
    recipe: Callable[..., Recipe],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    is_cpu: bool,
    has_engine: bool,
) -> None:
    monkeypatch.setattr("megarl.planner.model_sizes.runs_on_cpu", lambda: is_cpu)
    monkeypatch.setattr("megarl.platform.transformer_engine.is_installed", lambda: has_engine)
    model = {"path": str(tiny_model(family="qwen3_moe", num_heads=4, num_kv_heads=2, head_dim=32))}
    made = recipe(model=model, trainer={"recompute": "selective", "recompute_modules": ["moe_act"]})
    if has_engine and not is_cpu:
        check(made)
    else:
        with pytest.raises(ConfigError, match=r"recompute_modules = \['moe_act'\]: moe_act needs Transformer Engine"):
            check(made)
