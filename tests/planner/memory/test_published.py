"""Recipes of large models are planned without any download; their shapes are those of the published models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import yaml

from megarl.cli import main
from megarl.families.model_tensors import hf_tensors
from megarl.families.published import PUBLISHED, published_name
from megarl.families.shape import planned_shape, shape_from_config
from megarl.reshard.layouts.packed import checkpoint_tensors
from megarl.types import DataError
from tests.planner.memory.conftest import MODELS, RECIPES

LARGE = sorted(RECIPES.glob("qwen3_*.yaml"))
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
}
"""Parameters of the published checkpoints, by their index files."""
LATENT = {
    "deepseek-ai/DeepSeek-V3": 671,
    "deepseek-ai/DeepSeek-V3.1": 671,
    "moonshotai/Moonlight-16B-A3B": 16,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "zai-org/GLM-4.7-Flash": 30,
}
"""Billions of parameters in the models' papers, without the layer for multi-token prediction."""

QWEN = sorted(PARAMETERS)
GLM = {"zai-org/GLM-4.5": 358, "zai-org/GLM-4.6": 358, "zai-org/GLM-4.7": 358, "zai-org/GLM-4.5-Air": 110}
"""Billions of parameters of the published checkpoints, with the layer for multi-token prediction."""


@pytest.mark.parametrize("name", GLM)
def test_shapes_of_glm_have_the_published_number_of_parameters(tmp_path: Path, name: str) -> None:
    shape = planned_shape(tmp_path / name)
    tensors = hf_tensors(shape)
    trained = sum(map(math.prod, tensors.values()))
    last = f"model.layers.{shape.num_layers - 1}."
    layer = sum(math.prod(size) for tensor, size in tensors.items() if tensor.startswith(last))
    # The layer for multi-token prediction joins two hidden states; it has three norms, an embedding and a head.
    hidden = shape.hidden_size
    kept = layer + 2 * hidden * hidden + 3 * hidden + 2 * shape.vocab_size * hidden
    assert round((trained + kept) / 1e9) == GLM[name]
    if name.endswith("Air"):
        assert trained + kept == 110_468_824_832


GPT_OSS = {"openai/gpt-oss-20b": (20.91, 3.61), "openai/gpt-oss-120b": (116.83, 5.13)}
"""Billions of parameters by the model card (arXiv:2508.10925, table 1): all, and those used by a token."""


@pytest.mark.parametrize("name", GPT_OSS)
def test_shapes_of_gpt_oss_have_the_published_number_of_parameters(tmp_path: Path, name: str) -> None:
    shape = planned_shape(tmp_path / name)
    tensors = hf_tensors(shape)
    total = sum(map(math.prod, tensors.values()))
    unused = sum(math.prod(size) for tensor, size in tensors.items() if ".experts." in tensor)
    unused *= 1 - shape.top_k / shape.num_experts
    # The embedding of the input is not counted as used.
    unused += math.prod(tensors["model.embed_tokens.weight"])
    assert (round(total / 1e9, 2), round((total - unused) / 1e9, 2)) == GPT_OSS[name]
    assert sum(map(math.prod, checkpoint_tensors(shape).values())) == total
    assert shape.windows[:4] == (128, 0, 128, 0)


def test_the_shape_of_seed_oss_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    shape = planned_shape(tmp_path / "Seed-OSS-36B-Instruct")
    assert round(sum(map(math.prod, hf_tensors(shape).values())) / 1e9) == 36


@pytest.mark.parametrize("name", LATENT)
def test_shapes_with_latent_attention_have_the_published_number_of_parameters(tmp_path: Path, name: str) -> None:
    tensors = hf_tensors(planned_shape(tmp_path / name))
    assert round(sum(map(math.prod, tensors.values())) / 1e9) == LATENT[name]


@pytest.mark.parametrize("name", QWEN)
def test_a_published_shape_has_the_published_number_of_parameters(tmp_path: Path, name: str) -> None:
    shape = planned_shape(tmp_path / name)
    assert sum(map(math.prod, hf_tensors(shape).values())) == PARAMETERS[name]
    assert shape == shape_from_config(MODELS[name.partition("/")[2]])


def test_every_large_recipe_names_published_models() -> None:
    found: set[str | None] = set()
    for path in LARGE:
        sections = yaml.safe_load(path.read_text())
        found |= {published_name(sections["model"]["path"])}
        if teacher := sections.get("distillation", {}).get("teacher"):
            found |= {published_name(teacher)}
    assert found == set(QWEN)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_a_large_recipe_is_planned_where_no_model_is(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(path)])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        "is not on this machine, so memory is predicted with the sizes of Qwen/Qwen3-" in text
        and "before a start: hf download" in text
    )
    assert text.splitlines()[0].startswith("fits: ")


def test_a_folder_that_is_there_counts(tmp_path: Path) -> None:
    """An own model of the same name has its own sizes; and without its config.json it has none."""
    folder = tmp_path / "Qwen3-14B"
    folder.mkdir()
    with pytest.raises(DataError, match=r"config\.json"):
        planned_shape(folder)


def test_of_another_model_config_json_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hf download Qwen/Qwen2.5-7B config\.json; into this folder: "):
        planned_shape(Path("models/Qwen2.5-7B"))


def test_the_shape_of_qwen3_next_has_the_published_billions_of_parameters(tmp_path: Path) -> None:
    """The card says 80 billion, of which 3 are used for a token; layers for multi-token prediction not counted."""
    shape = planned_shape(tmp_path / "Qwen3-Next-80B-A3B-Instruct")
    tensors = hf_tensors(shape)
    assert round(sum(map(math.prod, tensors.values())) / 1e9) == 80
    unused = sum(math.prod(size) for name, size in tensors.items() if ".experts." in name) * (1 - 10 / 512)
    assert 3 <= (sum(map(math.prod, tensors.values())) - unused) / 1e9 < 4.5
    assert [kind.mixer for kind in shape.layers[2:4]] == ["linear_attention", "attention"]


QWEN3_5 = {
    "Qwen/Qwen3.5-27B": (27, 26),
    "Qwen/Qwen3.6-27B": (27, 26),
    "Qwen/Qwen3.5-35B-A3B": (35, 3),
    "Qwen/Qwen3.6-35B-A3B": (35, 3),
    "Qwen/Qwen3.5-122B-A10B": (122, 9),
    # The model's name counts the vision tower too.
    "Qwen/Qwen3.5-397B-A17B": (396, 16),
}
"""Billions of parameters of the text models: all, and those used by a token without the embedding of the input."""


@pytest.mark.parametrize("name", QWEN3_5)
def test_shapes_of_qwen3_5_have_the_published_billions_of_parameters(tmp_path: Path, name: str) -> None:
    shape = planned_shape(tmp_path / name)
    sizes = {tensor: math.prod(size) for tensor, size in hf_tensors(shape).items()}
    total = sum(sizes.values())
    unused = sum(size for tensor, size in sizes.items() if ".experts." in tensor)
    unused *= 1 - shape.top_k / shape.num_experts if shape.num_experts else 0
    unused += sizes["model.language_model.embed_tokens.weight"]
    assert (round(total / 1e9), round((total - unused) / 1e9)) == QWEN3_5[name]
    assert [kind.mixer for kind in shape.layers[2:4]] == ["linear_attention", "attention"]


def test_the_text_model_of_qwen3_8_has_the_parameters_of_its_name() -> None:
    """Qwen3.8-2.4T-A95B: the family's fields at the top level of config.json, without a vision tower."""
    text = PUBLISHED["Qwen/Qwen3.5-397B-A17B"]["text_config"] | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 8192,
        "num_hidden_layers": 92, "num_attention_heads": 64, "num_key_value_heads": 4, "linear_num_value_heads": 128,
        "moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048, "mamba_ssm_dtype": "bfloat16",
    }  # fmt: skip
    shape = shape_from_config(text)
    sizes = {tensor: math.prod(size) for tensor, size in hf_tensors(shape).items()}
    unused = sum(size for tensor, size in sizes.items() if ".experts." in tensor) * (1 - 10 / 512)
    assert (round(sum(sizes.values()) / 1e11), round((sum(sizes.values()) - unused) / 1e9)) == (24, 95)
    assert sum(kind.mixer == "attention" for kind in shape.layers) == 23


def test_a_relative_of_the_largest_qwen3_5_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    """Intern-S2-397B has the same text model with more tokens. Its files have so many weights outside of experts."""
    shape = dataclasses.replace(planned_shape(tmp_path / "Qwen3.5-397B-A17B"), vocab_size=251392)
    outside = {tensor: size for tensor, size in hf_tensors(shape).items() if ".experts." not in tensor}
    assert sum(map(math.prod, outside.values())) == 9_824_459_520


def test_the_shape_of_qwen3_6_27b_has_the_published_bytes(tmp_path: Path) -> None:
    """The index of its files says 55.56 GB in bfloat16, with vision tower and layer for multi-token prediction."""
    shape = planned_shape(tmp_path / "Qwen3.6-27B")
    sizes = {tensor: math.prod(size) for tensor, size in hf_tensors(shape).items()}
    last = f"model.language_model.layers.{shape.num_layers - 1}."
    layer = sum(size for tensor, size in sizes.items() if tensor.startswith(last))
    # The layer for multi-token prediction joins two hidden states. It has no embedding and no head of its own.
    hidden = shape.hidden_size
    kept = layer + 2 * hidden * hidden + 3 * hidden
    # Qwen3-VL's vision tower: 27 layers of 1152 channels, a merger to the model's width, positions and patches.
    width, inner, merged = 1152, 4304, 4 * 1152
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    merger = merged * merged + merged + merged * hidden + hidden + 2 * width
    tower = 27 * block + merger + 2304 * width + 3 * 2 * 16 * 16 * width + width
    assert round(2 * (sum(sizes.values()) + kept + tower) / 1e9, 2) == 55.56
