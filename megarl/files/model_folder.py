"""The files of a Hugging Face model folder, and checks that they are complete. Reads only the headers of weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megarl.files.hub import cached_folder, download_command
from megarl.files.regular import check_folder_of_files, check_regular
from megarl.files.shipped import input_command
from megarl.files.strict_json import LARGE, MEDIUM, SMALL, parse
from megarl.types import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHECKSUMS = "model.safetensors.checksums.json"
CARD = "README.md"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

_MAX_VALUES = {
    "tokenizer.json": LARGE,
    "vocab.json": LARGE,
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), MEDIUM),
    # A quantised mixture of experts lists all its layers in config.json.
    **dict.fromkeys(("config.json", INDEX, CHECKSUMS, "manifest.json"), MEDIUM),
    # It holds the gradient norms and losses of train.spike_window steps.
    "driver.json": MEDIUM,
}
"""Maximum number of JSON values by file name. All other files are small."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf")
"""File extensions of weights in any format."""
UNREAD = (
    *(f"*{ending}" for ending in WEIGHTS if ending != ".safetensors"),
    "original/*",
    "consolidated*.safetensors",
)
"""Patterns of files on the Hub that megarl does not use: weights in other formats, and second copies of weights."""


def sibling_folder(model: Path, name: str) -> Path:
    """Return the folder of an `adapter` or `drafter` trained with an exported model.

    hf, hf_best and hf_step_NNNNNN become NAME, NAME_best and NAME_step_NNNNNN; FOLDER becomes FOLDER_NAME.
    """
    if model.name.startswith("hf"):
        return model.with_name(name + model.name.removeprefix("hf"))
    return model.with_name(f"{model.name}_{name}")


def check_model_folder(folder: str | Path) -> list[str]:
    """Return the errors of a folder's weights and tokenizer, one per line. `families.shape` checks config.json."""
    folder = Path(folder)
    if not folder.is_dir():
        return [missing_folder_message(folder)]
    try:
        check_folder_of_files(folder)
    except DataError as error:
        return [str(error)]
    problems: list[str] = []

    def read_or_record_error(reader: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return reader(*arguments)
        except DataError as error:
            problems.append(str(error))

    for file, tensors in (read_or_record_error(weight_files, folder) or {}).items():
        read_or_record_error(read_safetensors_header, folder / file, tensors)
    for name in TOKENIZER:
        read_or_record_error(read_object, folder / name)
    return problems


def find_folder(path: str) -> str:
    """Return an existing path, or the cached folder of a Hub name OWNER/NAME; else `path`."""
    # Try a local folder first: OWNER/NAME is a relative path too.
    if Path(path).exists() or (hub_folder := cached_folder(path, "model", without=UNREAD)) is None:
        return path
    return str(hub_folder)


_EXPORTED = re.compile(r"hf(_best|_step_\d+)?")
"""Names of the folders in which a run exports models."""

HUB_OWNERS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "mistral": "mistralai"}
"""Owner (organisation) of a model on the Hub, by the prefix of the model's name."""


def missing_folder_message(folder: Path, file: str = "") -> str:
    """Return the error for a missing model folder: how to make it, or the command that downloads it.

    With `file` the command downloads only this file. It has the model's name on the Hub, if known.
    """
    if command := input_command(folder):
        return f"{folder}: model folder not found; this command makes it: {command}"
    if _EXPORTED.fullmatch(folder.name) and (run := folder.parent).name:
        has_recipe = (run / "config.yaml").is_file()
        remedy = f"megarl train {run} --resume" if has_recipe else f"run its recipe first, {run.name}.yaml"
        return f"{folder}: model folder not found. The run {run.name} exports it at its end: {remedy}"
    sentence_start = f"{file} is enough here, and" if file else "It"
    return (
        f"{folder}: model folder not found. model.path is a local folder, or the name of a model in the Hugging Face "
        f"Hub's cache. {sentence_start} comes with: {download_commands(folder, file)}"
    )


def download_commands(folder: Path, file: str = "") -> str:
    """Return shell commands that download a missing model into the Hub's cache, and into this folder.

    `file`: as in `missing_folder_message`.
    """
    name = folder.name or "NAME"
    owner = next((HUB_OWNERS[prefix] for prefix in HUB_OWNERS if name.lower().startswith(prefix)), None)
    # A path of two parts may itself be a name on the Hub.
    hub_name = f"{owner}/{name}" if owner else str(folder) if len(folder.parts) == 2 else f"OWNER/{name}"
    command = download_command(f"{hub_name} {file}".strip(), "model")
    return f"{command}; into this folder: {command} --local-dir {folder}"


def weight_files(folder: str | Path) -> dict[str, set[str]]:
    """Return a model folder's safetensors files, each with the names of its tensors from the index.

    Without an index the names are empty. Raises DataError for a folder without safetensors or with two forms of the
    weights. Raises it too for an index that is invalid or names a file outside the folder.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            unreadable_files = sorted(
                path for suffix in ("bin", "pt", "pth", "ckpt", "pkl") for path in folder.glob(f"*.{suffix}")
            )
            faulty_path = unreadable_files[0] if unreadable_files else folder
            raise DataError(
                f"{faulty_path}: neither {SINGLE} nor {INDEX} found. megarl reads weights from "
                "safetensors only; convert other formats with transformers' save_pretrained."
            )
        if shards := sorted(path.name for path in folder.glob("model-*-of-*.safetensors")):
            # transformers reads the single file, vLLM all of them.
            raise DataError(
                f"{folder / SINGLE}: the folder also has {shards[0]}, but no {INDEX}. Either may be the model; "
                "remove the wrong files."
            )
        return {SINGLE: set()}
    files: dict[str, set[str]] = {}
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise DataError(f"{folder / INDEX}: the index has no weight_map. {_COPY_AGAIN}")
    for tensor, shard in weight_map.items():
        # A downloaded index must not make megarl read files elsewhere.
        if not isinstance(shard, str) or shard in ("", ".", "..") or Path(shard).name != shard:
            raise DataError(
                f"{folder / INDEX}: the index places the tensor {tensor} in {shard!r}, which is not a file of this "
                "folder. Copy or download the file again."
            )
        files.setdefault(shard, set()).add(tensor)
    if SINGLE not in files and (folder / SINGLE).exists():
        # transformers reads the single file, vLLM those of the index.
        raise DataError(
            f"{folder / SINGLE}: lies beside {INDEX}, which does not name it. These are two forms of the weights; "
            "remove the wrong one."
        )
    return files


def stored_names(folder: str | Path) -> set[str]:
    """Return a model folder's tensor names. Empty without weights, or if a file is broken (see `weight_files`)."""
    try:
        if (Path(folder) / INDEX).exists():
            return set().union(*weight_files(folder).values())
        return set(read_safetensors_header(Path(folder) / SINGLE))
    except DataError:
        return set()


def largest_token(folder: str | Path) -> tuple[str, int]:
    """Return the largest token id in a folder's tokenizer.json, with its token. Raises DataError for an invalid
    file.
    """
    path = Path(folder) / TOKENIZER[0]
    tokenizer = read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # A Unigram tokenizer lists tokens and their scores, in the order of ids.
            ids_and_tokens = [(len(vocabulary) - 1, str(vocabulary[-1][0]))] if vocabulary else []
        else:
            ids_and_tokens = [(int(token_id), str(token)) for token, token_id in vocabulary.items()]
        ids_and_tokens += [(int(token["id"]), str(token["content"])) for token in tokenizer.get("added_tokens") or ()]
        token_id, token = max(ids_and_tokens)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise DataError(f"{path}: the tokenizer file has no vocabulary. {_COPY_AGAIN}") from None
    return token, token_id


def vocabulary_of(folder: str | Path) -> tuple[object, object]:
    """Return vocabulary and added tokens of a folder's tokenizer, for a comparison of two tokenizers.

    Embedding sizes are not compared, because models pad them differently.
    """
    tokenizer = read_object(Path(folder) / TOKENIZER[0])
    model, added_tokens = tokenizer.get("model") or {}, tokenizer.get("added_tokens") or ()
    return model.get("vocab"), [(token["content"], token["id"]) for token in added_tokens]


def companion_files(folder: str | Path) -> dict[str, Path]:
    """Return all files of a model folder except weights, their index, checksums and manifests, by relative path.

    Hidden folders are skipped.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {
        name: path
        for name, path in paths.items()
        if not (path.suffix in WEIGHTS or name.endswith((".index.json", "manifest.json", CHECKSUMS)))
        and not any(part.startswith(".") for part in name.split("/")[:-1])
    }


def read_safetensors_header(path: Path, expected: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of a file's tensors by name. Raises DataError for a truncated file or a missing tensor."""
    try:
        # The numpy framework needs no torch. Only the header is read.
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            header = {
                name: (tensor_slice.get_dtype(), tuple(tensor_slice.get_shape()))
                for name, tensor_slice in slices.items()
            }
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cut short or not a safetensors file ({error}). {_COPY_AGAIN}") from None
    if missing_tensors := set(expected) - header.keys():
        raise DataError(
            f"{path}: the tensor {min(missing_tensors)} is missing, although {INDEX} lists it for this file. "
            f"{_COPY_AGAIN}"
        )
    return header


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors header: the format's code of its dtype, its shape, its bytes."""

    code: str
    shape: tuple[int, ...]
    num_bytes: int


def safetensors_header(tensors: Mapping[str, HeaderEntry]) -> bytes:
    """Return the first bytes of a safetensors file with these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + entry.num_bytes
        header[name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header so that the data begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_COPY_AGAIN = "Copy or download the file again."


def max_values_of(name: str) -> int:
    return _MAX_VALUES.get(name, SMALL)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError, also for more values than a file of this name has."""
    try:
        value = parse(check_regular(path).read_bytes(), max_values_of(path.name))
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {_COPY_AGAIN}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not a JSON object. {_COPY_AGAIN}")
    return value
