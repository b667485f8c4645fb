"""The tokens that end turns in chat templates, and what a model folder and its exports say about them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megarl.config import ModelConfig
from megarl.data.chat import load_tokenizer
from megarl.data.templates.turn_ends import added_turn_ends, export_files, turn_ends
from tests.data.templates import tokenizer_of
from tests.data.test_chat import CHATML, byte_level, with_template

HARMONY = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>f to=assistant<|message|>' + m.content + '<|end|>' }}{% else %}"
    "{% if m.reasoning_content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '<|start|>assistant to=functions.' + c.function.name + '<|message|>' }}"
    "{{ c.function.arguments | tojson + '<|call|>' }}{% endfor %}{% if not m.tool_calls %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Ends a message of thoughts with the token that ends an answer in history."""
HARMONY_TOKENS = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"


def harmony() -> PreTrainedTokenizerFast:
    return with_template(byte_level(), HARMONY, HARMONY_TOKENS, eos_token="<|return|>")


def bare() -> PreTrainedTokenizerFast:
    return with_template(byte_level(), BARE, ["<s>"], eos_token="<s>")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        pytest.param(lambda: tokenizer_of("chatml"), ["<|im_end|>"], id="ChatML, no calls"),
        pytest.param(lambda: tokenizer_of("qwen"), ["<|im_end|>"], id="Qwen"),
        pytest.param(lambda: tokenizer_of("llama"), ["<|eot_id|>"], id="Llama, one call a turn"),
        pytest.param(lambda: tokenizer_of("mistral"), ["</s>"], id="Mistral"),
        pytest.param(lambda: tokenizer_of("glm"), ["<|user|>", "<|observation|>"], id="GLM: the next role"),
        pytest.param(lambda: tokenizer_of("deepseek"), ["<eos>"], id="DeepSeek: calls end with a token of their own"),
        pytest.param(harmony, ["<|return|>"], id="gpt-oss: not the end of thoughts"),
        pytest.param(bare, [], id="no special token"),
    ],
)
def test_the_end_of_a_turn_in_each_family(make: Callable[[], PreTrainedTokenizerFast], names: list[str]) -> None:
    tokenizer = make()
    assert [tokenizer.convert_ids_to_tokens(token) for token in turn_ends(tokenizer)] == names


def model_folder(tmp_path: Path, tiny_model: Callable[..., Path], **generation: object) -> Path:
    """A model that ends with `<|endoftext|>` everywhere, and whose template ends turns with `<|im_end|>`."""
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CHATML)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").unlink()
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    return folder


@pytest.mark.parametrize(
    ("generation", "exported"),
    [
        pytest.param({"eos_token_id": 0, "top_p": 0.8}, {"eos_token_id": [0, 2], "top_p": 0.8}, id="another token"),
        pytest.param({"eos_token_id": [7, 0]}, {"eos_token_id": [7, 0, 2]}, id="other tokens"),
        pytest.param({}, {"eos_token_id": [0, 2]}, id="no generation config"),
        pytest.param({"eos_token_id": [2, 0]}, None, id="the same token"),
    ],
)
def test_an_export_names_the_templates_end(
    tmp_path: Path, tiny_model: Callable[..., Path], generation: dict[str, object], exported: dict[str, object] | None
) -> None:
    folder = model_folder(tmp_path, tiny_model, **generation)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens([0, 2]) == ["<|endoftext|>", "<|im_end|>"]
    assert added_turn_ends(folder, tokenizer) == (() if exported is None else (2,))
    files = export_files(ModelConfig(path=str(folder)))
    assert {name: json.loads(text) for name, text in files.items()} == (
        {} if exported is None else {"generation_config.json": exported}
    )
