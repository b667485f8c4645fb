"""Rows of data sources: JSON lines, JSON, CSV, Parquet and Arrow; a file, a folder of them, a data set of the Hub.

A source is a path, a name on the Hub (OWNER/NAME or OWNER/NAME/FOLDER, found in its cache), or SPLIT@ before either.
Rows come one after the other: no file but a JSON one is in memory as a whole.
"""

from __future__ import annotations

import base64
import csv
import datetime
import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from megarl.files.hub import cached_folder, download_command, is_hub_name
from megarl.files.strict_json import parse
from megarl.types import ConfigError, DataError

SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval", "heldout")
"""Words that name a split: alone, or at the start or end of the name of a file or folder."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files beside data, as `datasets` writes them."""
_SHARD = re.compile(r"[-_.](\d{5,7})-of-(\d{5,7}).*")
_PART = re.compile(r"([-_.](part)?\d+)+$")
"""The number of a file that has others beside it: `train-1`."""
_SEPARATORS = re.compile(r"[-_.]")
_MADE_BESIDE = ("cache-", "tmp")
"""How `datasets` begins the names of Arrow files with intermediate results."""
_ARROW_ROWS = 32
"""Rows that are taken from a Parquet or Arrow file at once."""
_ARROW_BUFFER_BYTES = 1 << 20
_LONGEST_CELL = 1 << 27


class Row(NamedTuple):
    """A row of a file: its number, from 1, in what `unit` counts, and its value; of a faulty one, behind which others
    can be read, the DataError."""

    number: int
    unit: str
    value: Any
    columns: tuple[str, ...] = ()
    """The fields that the file says its rows may have, those inside of objects by dotted names; none where it does
    not."""


def data_files(source: str | Path) -> list[Path]:
    """The files of a source, in the order of their names.

    Raises DataError where there is none: with the command that downloads it for what may be a name on the Hub; for a
    folder with several splits, configurations or kinds of files, of which none is named; and for one that lacks shards.
    """
    split, place = _parted(str(source))
    path = _found(place)
    if path.is_file():
        if split is not None:
            raise DataError(f"{source}: {path} is one file, which has no splits; give it without {split}@")
        return [path]
    inside = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in READERS and file.name not in _DESCRIPTIONS and file.is_file()
    ]
    inside = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    inside = [file for file in inside if not (file.suffix == ".arrow" and file.name.startswith(_MADE_BESIDE))]
    files = _of_split(source, {file: file.relative_to(path) for file in inside}, split, place)
    _check_configurations(source, files, place, is_of_hub=not Path(place).exists())
    _check_shards(source, files)
    inside = list(files)
    if not inside:
        raise DataError(f"{source}: {path} holds no file of data; known are {', '.join(READERS)}")
    endings = sorted({file.suffix.lower() for file in inside})
    if len(endings) > 1:
        raise DataError(f"{source}: {path} holds files of several kinds, {', '.join(endings)}; give a folder of one")
    return inside


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a file, by its ending; one of another ending is read as JSON lines. Raises DataError."""
    yield from READERS.get(path.suffix.lower(), _json_lines)(path)


def _parted(source: str) -> tuple[str | None, str]:
    """Split and place of a source."""
    split, at, place = source.partition("@")
    if not at or Path(source).exists() or not re.fullmatch(r"[\w.-]+", split):
        return None, source
    return split, place


def _found(place: str) -> Path:
    """The file or folder of a place. Raises DataError where there is none."""
    path = Path(place)
    if path.exists():
        return path
    name = "/".join(place.split("/")[:2])
    if not is_hub_name(name) or path.suffix.lower() in READERS:
        raise DataError(f"{place}: no such file; check the path")
    folder = cached_folder(name, "dataset")
    if folder is None:
        raise DataError(
            f"{place}: no such file, and no data set of this name is in the Hub's cache; check the path, or: "
            f"{download_command(name, 'dataset')}"
        )
    if not (inside := folder / place[len(name) :].strip("/")).exists():
        raise DataError(f"{place}: the data set {name} has no {inside.relative_to(folder)}; check the name")
    return inside


def _of_split(source: str | Path, files: dict[Path, Path], split: str | None, place: str) -> dict[Path, Path]:
    """The files, with their paths in the folder, that are of a split. Raises DataError where it is not one."""
    named = sorted({word for inside in files.values() for word in _words(inside)})
    if split is None:
        if len(named) > 1:
            raise DataError(f"{source}: has several splits, {', '.join(named)}; name one: {named[0]}@{place}")
        return files
    # What has just this name is meant, also where the name is a word in others.
    exact = {file: inside for file, inside in files.items() if split in (*inside.parts[:-1], inside.stem, _set(inside))}
    if exact:
        return exact
    found = {file: inside for file, inside in files.items() if split in _words(inside)}
    if not found:
        known = f"it has {', '.join(named)}" if named else "it has none that is named"
        raise DataError(f"{source}: {_found(place)} has no split {split!r}; {known}")
    sets = sorted({next(name for name in _names(inside) if split in _words_of(name)) for inside in found.values()})
    if len(sets) > 1:
        raise DataError(
            f"{source}: several sets are of the split {split}, {', '.join(sets)}; name one: {sets[0]}@{place}"
        )
    return found


def _check_configurations(source: str | Path, files: dict[Path, Path], place: str, *, is_of_hub: bool) -> None:
    """Raises DataError where the files of a split are in several folders, as those of a data set's configurations.

    Other files of a folder may be in folders of their own.
    """
    folders = {
        "/".join(part for part in inside.parts[:-1] if part not in SPLITS)
        for inside in files.values()
        if is_of_hub or any(map(_words_of, _names(inside)[:2]))
    }
    if len(folders) < 2:
        return
    known = sorted(f"{place.rstrip('/')}/{folder}".rstrip("/") for folder in folders)
    raise DataError(
        f"{source}: has files of a split in several folders, as of several configurations: {', '.join(known)}; give "
        "one of the folders"
    )


def _check_shards(source: str | Path, files: dict[Path, Path]) -> None:
    """Raises DataError where a file says that there are others beside it, and there are not."""
    found: dict[Path, dict[str, set[int]]] = {}
    for inside in files.values():
        if match := _SHARD.search(inside.name):
            counts = found.setdefault(inside.parent / inside.name[: match.start()], {})
            counts.setdefault(match[2], set()).add(int(match[1]))
    for name, counts in found.items():
        if len(counts) > 1:
            several = ", ".join(f"-of-{count}" for count in counts)
            raise DataError(f"{source}: {name} is there several times, {several}; remove all but one")
        for count, numbers in counts.items():
            # Some count from 1.
            first = 1 if int(count) in numbers and 0 not in numbers else 0
            lacking = sorted({*range(first, int(count) + first)} - numbers)
            if lacking:
                told = ", ".join(f"{number:0{len(count)}}" for number in lacking[:5])
                more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
                raise DataError(
                    f"{source}: of the {int(count)} files {name}-*-of-{count} these are missing: {told}{more}; "
                    "download or copy it again, or give the files that are to be read in a folder under other names"
                )


def _names(path: Path) -> tuple[str, ...]:
    """The names of a file in a folder that may say its split: those of its folders, and its own without a number."""
    return (_set(path), *reversed(path.parts[:-1]))


def _set(path: Path) -> str:
    """The name of a file without that of its shard or part."""
    return _PART.sub("", _SHARD.sub("", path.stem))


def _words(path: Path) -> set[str]:
    """The splits that the name of a file, or those of its folders, begin or end with."""
    return {word for name in _names(path) for word in _words_of(name)}


def _words_of(name: str) -> set[str]:
    parts = _SEPARATORS.split(name)
    return {parts[0], parts[-1]}.intersection(SPLITS)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    yield Row(line, "line", parse(raw))
                except ValueError as error:
                    text = f"not JSON ({error}); each line must be one JSON object"
                    yield Row(line, "line", DataError(f"{path}, line {line}: {text}"))


def _json(path: Path) -> Iterator[Row]:
    """A list of objects, or JSON lines under this ending."""
    with path.open("rb") as file:
        is_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _json_lines(path)
        return
    try:
        values = parse(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); write a list of objects, or one object a line") from None
    for number, value in enumerate(values, start=1):
        yield Row(number, "record", value)


def _csv(path: Path) -> Iterator[Row]:
    """Rows under a header; all values are text, and an empty cell is a field that is missing."""
    # The limit is one for all of Python; prompts are longer than its default.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        try:
            for cells in reader:
                if header is None:
                    header = cells
                    if len(set(header)) < len(header) or not all(header):
                        raise DataError(f"{path}, line 1: the columns {header} have no name each, or one twice")
                    continue
                if not cells:
                    continue
                if len(cells) != len(header):
                    fault = f"has {len(cells)} cells, the header has {len(header)}; put text with commas in quotes"
                    yield Row(reader.line_num, "line", DataError(f"{path}, line {reader.line_num}: {fault}"))
                    continue
                fields = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
                yield Row(reader.line_num, "line", fields, tuple(header))
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, after line {reader.line_num}: not UTF-8 ({error.reason})") from None


def _parquet(path: Path) -> Iterator[Row]:
    parquet = _arrow_module("parquet", path)
    # Neither whole columns nor the whole file are to be in memory.
    settings = {"buffer_size": _ARROW_BUFFER_BYTES, "pre_buffer": False}
    with _arrow_faults(path), parquet.ParquetFile(path, **settings) as file:
        yield from _rows_of_batches(file.iter_batches(batch_size=_ARROW_ROWS, use_threads=False))


def _arrow(path: Path) -> Iterator[Row]:
    """Arrow's file format, or its stream format, which `datasets` writes."""
    ipc = _arrow_module("ipc", path)
    with _arrow_faults(path), path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            with ipc.open_file(file) as reader:
                yield from _rows_of_batches(reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            with ipc.open_stream(file) as reader:
                yield from _rows_of_batches(reader)


def _rows_of_batches(batches: Any) -> Iterator[Row]:
    number = 0
    columns: tuple[str, ...] | None = None
    for batch in batches:
        columns = tuple(_columns(batch.schema)) if columns is None else columns
        for start in range(0, batch.num_rows, _ARROW_ROWS):
            for fields in batch.slice(start, _ARROW_ROWS).to_pylist():
                number += 1
                yield Row(number, "row", _plain(fields), columns)


def _columns(fields: Iterable[Any], within: str = "") -> Iterator[str]:
    """The names of Arrow's fields, and of those inside of them."""
    for field in fields:
        yield (name := f"{within}{field.name}")
        if str(field.type).startswith("struct"):
            yield from _columns((field.type.field(place) for place in range(field.type.num_fields)), f"{name}.")


def _arrow_module(name: str, path: Path) -> Any:
    """A module of pyarrow, which takes a while to load and is needed by few runs."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise ConfigError(
            f"{path}: pyarrow, which reads {path.suffix} files, is not installed; run launch/setup.sh, or give JSON "
            "lines"
        ) from None


@contextmanager
def _arrow_faults(path: Path) -> Iterator[None]:
    """Raise DataError for a file that pyarrow cannot read."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, OSError, NotImplementedError) as error:  # pyarrow's errors are among these
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())}); write the file again") from None


def _plain(value: Any) -> Any:
    """A value of Arrow as JSON has it: a null is a missing field, dates are text in ISO 8601, bytes in base64."""
    if isinstance(value, dict):
        plain = {name: _plain(item) for name, item in value.items()}
        return {name: item for name, item in plain.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal):
        return str(value)
    return value


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
"""How files are read, by their ending."""
