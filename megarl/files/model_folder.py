"""The files of a Hugging Face model folder and checks that they are complete. Reads headers, never weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.files.hub import cached_folder
from megarl.files.regular import check_folder_of_files, check_regular
from megarl.files.strict_json import parse
from megarl.types import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf")
"""Endings of weight files, in any format."""


def check_model_folder(folder: str | Path) -> list[str]:
    """Faults of a folder's weights and tokenizer, a line each; those of config.json: `families.shape`."""
    folder = Path(folder)
    if not folder.is_dir():
        return [missing_folder(folder)]
    try:
        check_folder_of_files(folder)
    except DataError as error:
        return [str(error)]
    problems: list[str] = []

    def read(reader: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return reader(*arguments)
        except DataError as error:
            problems.append(str(error))

    for file, tensors in (read(weight_files, folder) or {}).items():
        read(read_safetensors_header, folder / file, tensors)
    for name in TOKENIZER:
        read(read_object, folder / name)
    return problems


def found_folder(path: str) -> str:
    """The folder of a model: the path, or for a name on the Hub (OWNER/NAME) that is no folder its place in the cache.

    A path that is neither comes back as it is.
    """
    if Path(path).exists() or (cached := cached_folder(path, "model")) is None:
        return path
    return str(cached)


_EXPORTED = re.compile(r"hf(_best|_step_\d+)?")
"""Names of the folders to which a run exports its model."""

HUB_OWNERS = {"qwen": "Qwen", "llama": "meta-llama", "meta-llama": "meta-llama", "mistral": "mistralai"}
"""Owners on the Hugging Face Hub by the prefix of their models' names."""


def missing_folder(folder: Path, file: str = "") -> str:
    """Return the error message for a missing model folder: how to make it, or the command that downloads it.

    With a `file` the command downloads that file alone. The Hub's name stands in it where it is known.
    """
    if _EXPORTED.fullmatch(folder.name) and (run := folder.parent).name:
        is_there = (run / "config.yaml").is_file()
        remedy = f"megarl train {run} --resume" if is_there else f"run its recipe first, {run.name}.yaml"
        return f"{folder}: model folder not found. The run {run.name} exports it at its end: {remedy}"
    name = folder.name or "NAME"
    owner = next((HUB_OWNERS[start] for start in HUB_OWNERS if name.lower().startswith(start)), None)
    known = f"{owner}/{name}" if owner else str(folder) if len(folder.parts) == 2 else f"OWNER/{name}"
    wanted = f"{known} {file}".strip()
    enough = f"{file} is enough here, and" if file else "It"
    return (
        f"{folder}: model folder not found. model.path is a local folder, or the name of a model in the Hugging Face "
        f"Hub's cache. {enough} comes with: hf download {wanted}; into this folder: hf download {wanted} --local-dir "
        f"{folder}"
    )


def weight_files(folder: str | Path) -> dict[str, set[str]]:
    """The safetensors files of a model folder, each with the tensors that the index lists in it (none without index).

    Raises DataError for a folder without safetensors, and for an index that is broken or names a file elsewhere.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            others = sorted(path for kind in ("bin", "pt", "pth", "ckpt", "pkl") for path in folder.glob(f"*.{kind}"))
            raise DataError(
                f"{others[0] if others else folder}: neither {SINGLE} nor {INDEX} beside it. Weights are read from "
                "safetensors only; convert others with transformers' save_pretrained."
            )
        return {SINGLE: set()}
    files: dict[str, set[str]] = {}
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise DataError(f"{folder / INDEX}: has no weight_map. {_COPY_AGAIN}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or Path(shard).name != shard:
            raise DataError(f"{folder / INDEX}: {tensor} is said to be in {shard!r}, which is no file of this folder.")
        files.setdefault(shard, set()).add(tensor)
    return files


def largest_token(folder: str | Path) -> tuple[str, int]:
    """The token of a folder's tokenizer.json with the largest id. Raises DataError for a file that is broken."""
    path = Path(folder) / TOKENIZER[0]
    tokenizer = read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: tokens and their scores, in the order of ids
            tokens = [(len(vocabulary) - 1, str(vocabulary[-1][0]))] if vocabulary else []
        else:
            tokens = [(int(number), str(token)) for token, number in vocabulary.items()]
        tokens += [(int(token["id"]), str(token["content"])) for token in tokenizer.get("added_tokens") or ()]
        number, token = max(tokens)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise DataError(f"{path}: has no vocabulary. {_COPY_AGAIN}") from None
    return token, number


def companions(folder: str | Path) -> dict[str, Path]:
    """The files of a model folder but its weights and their index, by their names inside it."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {
        name: path
        for name, path in paths.items()
        if not (path.suffix in WEIGHTS or name.endswith((".index.json", "manifest.json")))
        and not any(part.startswith(".") for part in name.split("/")[:-1])
    }


def read_safetensors_header(path: Path, expected: Collection[str] = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of a file's tensors, by name. Raises DataError if it is cut short or lacks an expected tensor."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            header = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cut short or no safetensors file ({error}). {_COPY_AGAIN}") from None
    if absent := set(expected) - header.keys():
        raise DataError(f"{path}: lacks {min(absent)}, which {INDEX} says it holds. {_COPY_AGAIN}")
    return header


_COPY_AGAIN = "Copy or download the file again."


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError naming the file."""
    try:
        value = parse(check_regular(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {_COPY_AGAIN}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object. {_COPY_AGAIN}")
    return value
