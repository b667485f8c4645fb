"""Which files a Hugging Face model folder needs, and whether they are whole. Headers are read, never weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.types import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

_LARGEST_HEADER_BYTES = 100_000_000  # The limit of the safetensors format.


def check_model_folder(folder: str | Path) -> list[str]:
    """What is missing or broken among the folder's weights and tokenizer, a line each (config.json: `model_shape`)."""
    folder = Path(folder)
    if not folder.is_dir():
        return [
            f"{folder}: model folder not found. model.path is a local folder; "
            f"a model of the Hugging Face hub comes with: hf download NAME --local-dir {folder}"
        ]
    problems = []
    try:
        for shard, tensors in weight_files(folder).items():
            try:
                absent = tensors - read_safetensors_header(folder / shard).keys()
            except DataError as error:
                problems.append(str(error))
            else:
                if absent:
                    problems.append(
                        f"{folder / shard}: lacks {min(absent)}, which {INDEX} says it holds. {_COPY_AGAIN}"
                    )
    except DataError as error:
        problems.append(str(error))
    for name in TOKENIZER:
        try:
            _read_object(folder / name)
        except DataError as error:
            problems.append(str(error))
    return problems


def weight_files(folder: str | Path) -> dict[str, set[str]]:
    """The safetensors files of a model folder and the tensors the index expects in each (of a single file: none).

    Raises DataError for a folder without safetensors, and for an index that is broken or names a file elsewhere.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise DataError(
                f"{folder}: neither {SINGLE} nor {INDEX}. Weights are read from safetensors only; "
                "convert others with transformers' save_pretrained."
            )
        return {SINGLE: set()}
    files: dict[str, set[str]] = {}
    weight_map = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise DataError(f"{folder / INDEX}: has no weight_map. {_COPY_AGAIN}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or Path(shard).name != shard:
            raise DataError(f"{folder / INDEX}: {tensor} is said to be in {shard!r}, which is no file of this folder.")
        files.setdefault(shard, set()).add(tensor)
    return files


def read_safetensors_header(path: str | Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets} of one file. Raises DataError if it is not whole."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _LARGEST_HEADER_BYTES):
                raise DataError(f"{path}: cut short or no safetensors file ({size} bytes). {_COPY_AGAIN}")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"{path}: header cannot be read ({error}). {_COPY_AGAIN}") from None
    if size != 8 + header_bytes + end:
        raise DataError(f"{path}: {size} bytes where its header says {8 + header_bytes + end}. {_COPY_AGAIN}")
    return header


_COPY_AGAIN = "Copy or download the file again."


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not found. {_COPY_AGAIN}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {_COPY_AGAIN}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds no JSON object. {_COPY_AGAIN}")
    return value
