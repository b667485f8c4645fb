from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.data.chat import load_tokenizer
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import check_model_folder, largest_token, read_safetensors_header, weight_files
from megarl.files.regular import check_folder_of_files
from megarl.files.strict_json import MEDIUM
from megarl.types import DataError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder of two shards with an index."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5)}, folder / "one.safetensors")
    save_file({"c": torch.arange(7).to(torch.bfloat16)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_whole_folders_have_no_problem(folder: Path, tiny_model: Callable[..., Path]) -> None:
    assert check_model_folder(folder) == []
    assert check_model_folder(tiny_model()) == []
    assert weight_files(folder) == {"one.safetensors": {"a", "b"}, "two.safetensors": {"c"}}


def test_two_forms_of_the_weights_are_refused(folder: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """transformers reads the single file, vLLM the index's files, or all files if there is no index."""
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    [problem] = check_model_folder(folder)
    assert f"{folder / 'model.safetensors'}: lies beside {INDEX}, which does not name it" in problem
    reindex(folder, a="model.safetensors")
    assert check_model_folder(folder) == []
    single = tmp_path / "single"
    shutil.copytree(tiny_model(), single)
    save_file({"a": torch.zeros(2)}, single / "model-00002-of-00002.safetensors")
    [problem] = check_model_folder(single)
    assert "the folder also has model-00002-of-00002.safetensors" in problem


def test_header_tells_type_and_shape(folder: Path) -> None:
    assert read_safetensors_header(folder / "one.safetensors") == {"a": ("F32", (2, 3)), "b": ("I64", (5,))}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def reindex(folder: Path, **changed: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changed
    (folder / INDEX).write_text(json.dumps(index))


def corrupt_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = ord("[")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        pytest.param(lambda f: cut(f / "two.safetensors", -1), "two.safetensors", "cut short", id="cut data"),
        pytest.param(lambda f: cut(f / "two.safetensors", 40), "two.safetensors", "cut short", id="cut header"),
        pytest.param(lambda f: cut(f / "two.safetensors", 3), "two.safetensors", "cut short", id="cut length"),
        pytest.param(lambda f: cut(f / "two.safetensors", 0), "two.safetensors", "cut short", id="empty shard"),
        pytest.param(lambda f: corrupt_header(f / "one.safetensors"), "one.safetensors", "invalid JSON", id="header"),
        pytest.param(lambda f: (f / "one.safetensors").unlink(), "one.safetensors", "not found", id="missing shard"),
        pytest.param(
            lambda f: reindex(f, d="two.safetensors"), "two.safetensors", "the tensor d is missing", id="missing tensor"
        ),
        pytest.param(
            lambda f: reindex(f, d="../two.safetensors"), INDEX, "not a file of this folder", id="path traversal"
        ),
        pytest.param(lambda f: cut(f / INDEX, 20), INDEX, "cannot be read", id="broken index"),
        pytest.param(lambda f: (f / INDEX).write_text("{}"), INDEX, "no weight_map", id="empty index"),
        pytest.param(lambda f: (f / INDEX).unlink(), "", "neither model.safetensors nor", id="no weights"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "not found", id="no tokenizer"),
        pytest.param(
            lambda f: cut(f / "tokenizer.json", 99), "tokenizer.json", "cannot be read", id="broken tokenizer"
        ),
        pytest.param(
            lambda f: cut(f / "tokenizer_config.json", 0), "tokenizer_config.json", "cannot", id="tokenizer config"
        ),
        pytest.param(
            lambda f: os.mkfifo(f / "merges.txt"), "merges.txt", "not a regular file", id="a named pipe of any name"
        ),
    ],
)
def test_each_damage_is_the_only_line_and_names_the_file(
    folder: Path, damage: Callable[[Path], object], file: str, told: str
) -> None:
    damage(folder)
    (problem,) = check_model_folder(folder)
    assert problem.startswith(f"{folder / file}: ")
    assert told in problem


def test_a_named_pipe_is_refused_before_it_is_opened(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    for read in (read_model_shape, load_tokenizer):
        with pytest.raises(DataError, match=r"config\.json: is not a regular file"):
            read(folder)


def test_a_folder_that_may_be_entered_but_not_listed_is_named() -> None:
    own = os.geteuid()
    # Not below pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o311)
        try:
            if own == 0:  # nothing is denied to root
                os.seteuid(65534)
            with pytest.raises(DataError, match="cannot be listed"):
                check_folder_of_files(Path(folder))
        finally:
            os.seteuid(own)
            Path(folder).chmod(0o755)


def test_a_hub_name_is_answered_with_the_download_command(tmp_path: Path) -> None:
    (problem,) = check_model_folder(tmp_path / "org" / "name")
    assert "model folder not found" in problem and "hf download" in problem


def test_a_header_is_never_allocated_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataError, match="cut short or not a safetensors file"):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param({"hidden_size": "64"}, "hidden_size is '64'", id="text for a number"),
        pytest.param({"hidden_size": True}, "hidden_size is True", id="true for a number"),
        pytest.param({"num_attention_heads": 0}, "num_attention_heads is 0", id="no heads"),
        pytest.param({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3", id="heads"),
        pytest.param({"vocab_size": None}, "vocab_size is missing", id="null"),
        pytest.param({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'", id="text for a fraction"),
        pytest.param({"rms_norm_eps": None}, "rms_norm_eps", id="null for a fraction"),
        pytest.param({"rope_parameters": [1]}, "rope_parameters is", id="list for an object"),
        pytest.param({"tie_word_embeddings": "yes"}, "tie_word_embeddings is", id="text for a flag"),
        pytest.param({"architectures": "Qwen3ForCausalLM"}, "architectures is", id="architectures"),
        pytest.param({"architectures": []}, "architectures is", id="no architecture"),
        pytest.param({"model_type": "nonsense"}, "model_type is", id="unknown model type"),
        pytest.param({"model_type": None}, "model_type is missing", id="no model type"),
        pytest.param({"layer_types": 5}, "layer_types is 5", id="layer types"),
        pytest.param({"layer_types": ["x"] * 4}, "layer_types", id="unknown layer type"),
        pytest.param({"dtype": "foo"}, "dtype is", id="type"),
        pytest.param({"eos_token_id": "x"}, "eos_token_id", id="what only transformers reads"),
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: ", id="quantised"),
    ],
)
def test_a_fault_of_config_json_is_told_as_its_own(
    tiny_model: Callable[..., Path], tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(DataError, match=told) as caught:
        read_model_shape(folder)
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: ")


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"a":', b"[" * 5000, b'{"a": "\xff"}', b'{"a": 1, "a": 2}'])
def test_a_config_json_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_model_shape(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    ("model", "added", "largest"),
    [
        ({"vocab": {"a": 0, "b": 7}}, [], ("b", 7)),
        ({"vocab": {"a": 0, "b": 7}}, [{"id": 9, "content": "<x>"}], ("<x>", 9)),
        ({"vocab": [["a", -1.0], ["b", -2.0]]}, [], ("b", 1)),
    ],
)
def test_the_largest_token(tmp_path: Path, model: Any, added: Any, largest: tuple[str, int]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    assert largest_token(tmp_path) == largest


@pytest.mark.parametrize(
    "content", ["{}", '{"model": 5}', '{"model": {"vocab": {}}}', '{"model": {"vocab": {"a": "x"}}}']
)
def test_a_tokenizer_without_a_vocabulary(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer file has no vocabulary"):
        largest_token(tmp_path)


@pytest.mark.parametrize("name", ["hf", "hf_best", "hf_step_000004"])
def test_a_missing_export_of_a_run_names_what_makes_it(tmp_path: Path, name: str) -> None:
    run = tmp_path / "runs/quickstart_sft"
    [before] = check_model_folder(run / name)
    assert "run its recipe first, quickstart_sft.yaml" in before and "hf download" not in before
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    [unfinished] = check_model_folder(run / name)
    assert f"megarl train {run} --resume" in unfinished
    assert "hf download" in check_model_folder(tmp_path / "hfx")[0]


def test_a_tokenizer_with_more_values_than_any_is_not_loaded(folder: Path) -> None:
    """transformers would take 140 times the size of such a file."""
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "zz": [[]] * MEDIUM}, separators=(",", ":")))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read \(it has more than 1048576 values"):
        load_tokenizer(folder)


def test_a_tokenizer_of_the_largest_models_is_read(folder: Path) -> None:
    """262,144 tokens, most pairs of which are merged, as in Gemma 3."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {f"t{number}": number for number in range(262_144)}
    tokenizer["model"]["merges"] = [["a", f"t{number}"] for number in range(515_000)]
    file.write_text(json.dumps(tokenizer))
    assert check_model_folder(folder) == []
    assert largest_token(folder) == ("t262143", 262_143)
