"""Rows of data sources: JSON lines, JSON, CSV, Parquet and Arrow; a file, a folder, or a data set of the Hub.

JSON lines may be compressed. A source is a path, or a name on the Hub (OWNER/NAME or OWNER/NAME/FOLDER), read from the
local cache. SPLIT@ may stand before either. Rows are read one after another: only a JSON list is in memory as a whole.
"""

from __future__ import annotations

import base64
import csv
import datetime
import importlib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

from megarl.data.sources.compressed import COMPRESSIONS, extension_of, first_bytes, lines_of, stem_of
from megarl.data.sources.file_kinds import is_unread_data_file, refuse_other_text
from megarl.data.sources.harbor import read_task, task_files
from megarl.files.hub import Patterns, cached_folder, download_command, is_hub_name, names_repository
from megarl.files.shipped import input_command
from megarl.files.strict_json import MEDIUM, parse
from megarl.types import ConfigError, DataError

SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval", "heldout")
"""Names of splits. The name of a file or folder may be, begin with, or end with one."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that `datasets` writes next to the data."""
_SHARD = re.compile(r"[-_.](\d{5,7})-of-(\d{5,7}).*")
_PART = re.compile(r"([-_.](part)?\d+)+$")
"""Number of a file among several: `train-1`."""
_SEPARATORS = re.compile(r"[-_.]")
_GENERATED_FILES = ("cache-", "tmp")
"""Prefixes of Arrow files with intermediate results of `datasets`."""
_NARROW_FLOATS = re.compile(r"\b(float|halffloat)\b")
_NARROW_NUMPY: dict[str, Callable[[float], Any]] = {"float": np.float32, "halffloat": np.float16}
"""NumPy's types of Arrow's numbers with fewer bits than Python's float, by Arrow's name."""
_ARROW_ROWS = 32
"""Rows of a Parquet or Arrow file read at once. Few, because a row with long texts may have megabytes."""
_LONGEST_SHORTENED_LIST = 64
"""Maximum numbers of a list with shortest decimals. Longer lists are embeddings: no gold answer is a text of them, and
a conversion takes a microsecond for each of their numbers.
"""
# Buffered reads of 1 MiB, so that pyarrow does not load whole column chunks.
_ARROW_BUFFER_BYTES = 1 << 20
# 128 Mi characters in a CSV cell; Python's default of 131,072 is shorter than many conversations.
_LONGEST_CELL = 1 << 27


class EncodedBytes(str):
    """Bytes of a table that are not text, in base64."""

    __slots__ = ()


class Row(NamedTuple):
    """A row of a file: its number (from 1, in the unit `unit`) and its value.

    An invalid row has a DataError as value, so later rows can still be read.
    """

    number: int
    unit: str
    value: Any
    columns: tuple[str, ...] = ()
    """The file's declared field names, nested ones with dots. Empty: none are declared."""


def data_files(source: str | Path) -> list[Path]:
    """Return the files of a data source, sorted by name.

    Raises DataError if there are none; for a possible Hub name, with the download command. Raises DataError if shards
    are missing, or if a folder has several splits, configurations or kinds of files and the source names none.
    """
    split, path_or_name = _partition_source(str(source))
    path = _find_existing_path(path_or_name)
    if path.is_file():
        if split is not None:
            raise DataError(f"{source}: {path} is one file, so it has no splits; remove {split}@")
        return [path]
    # The folders of tasks hold files of any kind, which are not data.
    if split is None and (tasks := task_files(path)):
        return tasks
    # Hidden folders hold no data: `hf download --local-dir` puts its records into `.cache`.
    visible_paths = [
        inside
        for inside in sorted(path.rglob("*"))
        if not any(part.startswith(".") for part in inside.relative_to(path).parts)
    ]
    files_in_folder = [
        file
        for file in visible_paths
        if extension_of(file) in READERS and file.name not in _DESCRIPTIONS and file.is_file()
    ]
    files_in_folder = [
        file for file in files_in_folder if not (file.suffix == ".arrow" and file.name.startswith(_GENERATED_FILES))
    ]
    # A compressed file next to its decompressed copy holds the same rows.
    uncompressed_files = {file for file in files_in_folder if file.suffix.lower() not in COMPRESSIONS}
    files_in_folder = [
        file for file in files_in_folder if file in uncompressed_files or file.with_suffix("") not in uncompressed_files
    ]
    files = _files_of_split(source, {file: file.relative_to(path) for file in files_in_folder}, split, path_or_name)
    _refuse_several_configurations(source, files, path_or_name, is_hub_data_set=not Path(path_or_name).exists())
    _check_shards(source, files)
    files_in_folder = list(files)
    if not files_in_folder:
        raise DataError(
            f"{source}: the folder {path} holds no data files; add files ending with one of {', '.join(READERS)}"
        )
    endings = sorted({extension_of(file) for file in files_in_folder})
    if len(endings) > 1:
        raise DataError(
            f"{source}: the folder {path} has data files of several kinds, {', '.join(endings)}; give a folder with "
            "one kind"
        )
    unread_files = {file: file.relative_to(path) for file in visible_paths if is_unread_data_file(file)}
    _refuse_unread_files(source, path, split, unread_files=unread_files, read_files=files_in_folder)
    return files_in_folder


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. Unknown extensions are read as JSON lines. Raises DataError."""
    yield from READERS.get(extension_of(path), _read_json_lines)(path)


def _refuse_unread_files(
    source: str | Path,
    folder: Path,
    split: str | None,
    *,
    unread_files: Mapping[Path, Path],
    read_files: Sequence[Path],
) -> None:
    """Raise DataError if the folder holds records in files that megarl cannot read: they would be left out silently.

    `unread_files` has each such file's path inside the folder. With a split, only files of this split count. A
    compressed copy of a file that is read has no other records.
    """
    for file, path_in_folder in unread_files.items():
        is_of_split = split is None or split in _split_words_in_path(path_in_folder)
        if file.with_suffix("") in read_files or not is_of_split or not file.is_file():
            continue
        raise DataError(
            f"{source}: the folder {folder} also has {path_in_folder}, which is not read; convert it to "
            f"{extension_of(read_files[0])}, or give a folder without it"
        )


def _partition_source(source: str) -> tuple[str | None, str]:
    """Return the split (or None) and the path or Hub name of a data source `SPLIT@PATH`."""
    split, separator, path_or_name = source.partition("@")
    # A path may contain an @ itself: an existing path is never split.
    if not separator or Path(source).exists() or not re.fullmatch(r"[\w.-]+", split):
        return None, source
    return split, path_or_name


class HubDataSet(NamedTuple):
    """A data set on the Hub: its name, and patterns of the needed files (None: all)."""

    name: str
    only: Patterns | None


def missing_data_set(source: str) -> HubDataSet | None:
    """Return the source's data set on the Hub if the local cache lacks some of its files, else None."""
    data_set = _parse_hub_name(_partition_source(source)[1])
    if (
        data_set is None
        or not names_repository(data_set.name)
        or cached_folder(data_set.name, "dataset", data_set.only)
    ):
        return None
    return data_set


def hub_data_set(source: str) -> str | None:
    """Return a data source's name on the Hub. None: the source is local, or not in the cache."""
    data_set = _parse_hub_name(_partition_source(source)[1])
    return data_set.name if data_set is not None and cached_folder(data_set.name, "dataset", data_set.only) else None


def _parse_hub_name(path_or_name: str) -> HubDataSet | None:
    """Return the data set of a Hub name (OWNER/NAME/FOLDER). None: a local path."""
    name, path_inside = "/".join(path_or_name.split("/")[:2]), "/".join(path_or_name.split("/")[2:]).strip("/")
    # A path such as data/train.jsonl has the form of a Hub name too.
    if not is_hub_name(name) or Path(path_or_name).exists() or extension_of(Path(path_or_name)) in READERS:
        return None
    return HubDataSet(name, (path_inside, f"{path_inside}/*") if path_inside else None)


def _find_existing_path(path_or_name: str) -> Path:
    """Return the file or folder of a data source's path or Hub name. Raises DataError if there is none."""
    path = Path(path_or_name)
    if path.exists():
        return path
    if (data_set := _parse_hub_name(path_or_name)) is None:
        command = input_command(path)
        remedy = f"this command makes it: {command}" if command else "check the path"
        raise DataError(f"{path_or_name}: no such file; {remedy}")
    name = data_set.name
    folder = cached_folder(name, "dataset", data_set.only)
    if folder is None:
        raise DataError(
            f"{path_or_name}: no such file, and no data set of this name is in the Hub's cache; check the path, or "
            f"download it: {download_command(name, 'dataset')}"
        )
    if not (path_inside := folder / path_or_name[len(name) :].strip("/")).exists():
        raise DataError(
            f"{path_or_name}: the data set {name} has no file or folder {path_inside.relative_to(folder)}; check the "
            "name"
        )
    return path_inside


def _files_of_split(
    source: str | Path, files: dict[Path, Path], split: str | None, path_or_name: str
) -> dict[Path, Path]:
    """Return the files of a split, with their paths relative to the folder. Raises DataError for an unknown split."""
    split_names = sorted({word for relative_path in files.values() for word in _split_words_in_path(relative_path)})
    if split is None:
        if len(split_names) > 1:
            raise DataError(
                f"{source}: the folder has several splits, {', '.join(split_names)}; name one: "
                f"{split_names[0]}@{path_or_name}"
            )
        return files
    # An exact name wins over names that only contain the word: `test` is not `test_hard`.
    exact_matches = {
        file: relative_path
        for file, relative_path in files.items()
        if split in (*relative_path.parts[:-1], stem_of(relative_path), _unnumbered_name(relative_path))
    }
    if exact_matches:
        return exact_matches
    matches = {
        file: relative_path for file, relative_path in files.items() if split in _split_words_in_path(relative_path)
    }
    if not matches:
        available = f"it has {', '.join(split_names)}" if split_names else "it has none that is named"
        raise DataError(f"{source}: {_find_existing_path(path_or_name)} has no split {split!r}; {available}")
    names_with_split = sorted(
        {
            next(name for name in _names_in_path(relative_path) if split in _split_words(name))
            for relative_path in matches.values()
        }
    )
    if len(names_with_split) > 1:
        raise DataError(
            f"{source}: the split {split} could mean several files or folders, {', '.join(names_with_split)}; name "
            f"one, for example {names_with_split[0]}@{path_or_name}"
        )
    return matches


def _refuse_several_configurations(
    source: str | Path, files: dict[Path, Path], path_or_name: str, *, is_hub_data_set: bool
) -> None:
    """Raise DataError if the files of one split are in several folders.

    A data set on the Hub can have several configurations, such as languages, each with a folder and the same splits.
    `files` has each file's path inside the folder `path_or_name`. Of a local folder, only files with a split's name in
    their path are checked.
    """
    # Without the folders of splits, configuration/train and configuration/test are one folder. The first two names of
    # a path are those of the file and its folder.
    configuration_folders = {
        "/".join(part for part in inside.parts[:-1] if part not in SPLITS)
        for inside in files.values()
        if is_hub_data_set or any(map(_split_words, _names_in_path(inside)[:2]))
    }
    if len(configuration_folders) < 2:
        return
    choices = sorted(f"{path_or_name.rstrip('/')}/{folder}".rstrip("/") for folder in configuration_folders)
    raise DataError(
        f"{source}: files of one split are in several folders, as in a data set with several configurations: "
        f"{', '.join(choices)}; give one of the folders"
    )


def _check_shards(source: str | Path, files: dict[Path, Path]) -> None:
    """Raise DataError if shards are missing or doubled, by names like `-00000-of-00004`."""
    numbers_by_shard_set: dict[Path, dict[str, set[int]]] = {}
    for path_inside in files.values():
        if match := _SHARD.search(path_inside.name):
            numbers_by_count = numbers_by_shard_set.setdefault(
                path_inside.parent / path_inside.name[: match.start()], {}
            )
            numbers_by_count.setdefault(match[2], set()).add(int(match[1]))
    # `name` is the part before the number, `count` the number of shards that the names state.
    for name, numbers_by_count in numbers_by_shard_set.items():
        if len(numbers_by_count) > 1:
            set_names = ", ".join(f"-of-{count}" for count in numbers_by_count)
            raise DataError(
                f"{source}: the data file {name} exists in several sets of shards, {set_names}; remove all but one set"
            )
        for count, numbers in numbers_by_count.items():
            # Some programs number shards from 1.
            first_number = 1 if int(count) in numbers and 0 not in numbers else 0
            missing_numbers = sorted({*range(first_number, int(count) + first_number)} - numbers)
            if missing_numbers:
                first_missing = ", ".join(f"{shard_number:0{len(count)}}" for shard_number in missing_numbers[:5])
                remainder = f" and {len(missing_numbers) - 5} more" if len(missing_numbers) > 5 else ""
                raise DataError(
                    f"{source}: of the {int(count)} shards {name}-*-of-{count}, these are missing: "
                    f"{first_missing}{remainder}; download or copy the data set again, or move the "
                    "shards to be read into another folder under other names"
                )


def _names_in_path(path: Path) -> tuple[str, ...]:
    """Return the names to search for a split: the file's, then its folders', innermost first."""
    return (_unnumbered_name(path), *reversed(path.parts[:-1]))


def _unnumbered_name(path: Path) -> str:
    return _PART.sub("", _SHARD.sub("", stem_of(path)))


def _split_words_in_path(path: Path) -> set[str]:
    return {word for name in _names_in_path(path) for word in _split_words(name)}


def _split_words(name: str) -> set[str]:
    parts = _SEPARATORS.split(name)
    return {parts[0], parts[-1]}.intersection(SPLITS)


def _read_json_lines(path: Path) -> Iterator[Row]:
    refuse_other_text(path)
    for line, raw in enumerate(lines_of(path), start=1):
        if raw.strip():
            try:
                yield Row(line, "line", parse(raw, MEDIUM))
            except ValueError as error:
                text = f"not JSON ({error}); each line must be one JSON object"
                yield Row(line, "line", DataError(f"{path}, line {line}: {text}"))


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list, or of JSON lines in a file named `.json`."""
    # Skip white space and a byte-order mark; lists begin with a bracket, lines with a brace.
    is_list = first_bytes(path, 4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _read_json_lines(path)
        return
    if extension_of(path) != ".json":
        # A list is in memory as a whole, and a few compressed bytes may expand to gigabytes.
        raise DataError(f"{path}: is a compressed JSON list; decompress it, or write one object per line")
    try:
        # A list has any number of records, so this file takes as much memory as its values need.
        values = parse(path.read_bytes(), None)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); write a list of objects, or one object per line") from None
    for record_number, value in enumerate(values, start=1):
        yield Row(record_number, "record", value)


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file under its header. All values are text, and an empty cell is a missing field."""
    # Prompts exceed the default limit. The limit is global to the Python process, so it is never lowered.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    refuse_other_text(path)
    # Spreadsheet programs begin files with a byte-order mark. `newline=""` leaves line breaks inside cells unchanged.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        try:
            for cells in reader:
                if header is None:
                    header = cells
                    if len(set(header)) < len(header) or not all(header):
                        raise DataError(
                            f"{path}, line 1: the columns are named {header}; each column needs a name of its own"
                        )
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
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, after line {reader.line_num}: not valid UTF-8 ({error.reason})") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = _import_arrow_module("parquet", path)
    # Without these settings pyarrow reads whole columns of a row group ahead into memory.
    settings = {"buffer_size": _ARROW_BUFFER_BYTES, "pre_buffer": False}
    with _raise_arrow_errors_as_data_errors(path), parquet.ParquetFile(path, **settings) as file:
        yield from _read_batches(path, file.iter_batches(batch_size=_ARROW_ROWS, use_threads=False))


def _read_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow file, in the file format or in the stream format (written by `datasets`)."""
    ipc = _import_arrow_module("ipc", path)
    with _raise_arrow_errors_as_data_errors(path), _BoundedReads(io.FileIO(path)) as file:
        # The file format begins with this magic number; the stream format has none.
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            with ipc.open_file(file) as reader:
                batches = (reader.get_batch(batch_index) for batch_index in range(reader.num_record_batches))
                yield from _read_batches(path, batches)
        else:
            with ipc.open_stream(file) as reader:
                yield from _read_batches(path, reader)


class _BoundedReads(io.BufferedReader):
    """A file whose reads allocate at most the file's remaining size.

    A damaged Arrow file may name a message of any size. Python (3.11) allocates the whole size before it reads.
    """

    def read(self, size: int | None = -1) -> bytes:
        bytes_left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(bytes_left if size is None or size < 0 else min(size, bytes_left))


def _read_batches(path: Path, batches: Any) -> Iterator[Row]:
    row_number = 0
    columns: tuple[str, ...] | None = None
    for batch in batches:
        # pyarrow (25.0) trusts the offsets in a batch: a damaged file would crash this process.
        batch.validate(full=True)
        if columns is None:
            columns = tuple(_list_columns(batch.schema))
            if len(set(columns)) < len(columns):
                repeated = next(name for index, name in enumerate(columns) if name in columns[:index])
                raise DataError(f"{path}: the column {repeated!r} occurs twice; rename or remove one of them")
        narrow_types = {field.name: field.type for field in batch.schema if _NARROW_FLOATS.search(str(field.type))}
        for first_row in range(0, batch.num_rows, _ARROW_ROWS):
            # Maps become dicts. By default pyarrow makes lists of pairs, in which no field is found by its name.
            for fields in batch.slice(first_row, _ARROW_ROWS).to_pylist(maps_as_pydicts="strict"):
                row_number += 1
                shortened = {
                    name: _shorten_floats(fields[name], arrow_type) for name, arrow_type in narrow_types.items()
                }
                yield Row(row_number, "row", _to_python({**fields, **shortened}), columns)


def _shorten_floats(value: Any, arrow_type: Any) -> Any:
    """Return a value of an Arrow type with the shortest decimals for its numbers of 16 and 32 bits.

    A gold answer of 0.1 in 32 bits is 0.10000000149011612 as Python's float: no answer would equal its text.
    """
    if value is None:
        return None
    if str(arrow_type).startswith("dictionary"):
        arrow_type = arrow_type.value_type
    if convert := _NARROW_NUMPY.get(str(arrow_type)):
        return float(str(convert(value)))
    if isinstance(value, dict):
        types = _item_types(arrow_type, value)
        return {name: _shorten_floats(item, types[name]) for name, item in value.items()}
    if isinstance(value, list):
        if len(value) > _LONGEST_SHORTENED_LIST and str(arrow_type.value_type) in _NARROW_NUMPY:
            return value
        return [_shorten_floats(item, arrow_type.value_type) for item in value]
    return value


def _item_types(arrow_type: Any, value: Any) -> dict[Any, Any]:
    if str(arrow_type).startswith("map"):
        return dict.fromkeys(value, arrow_type.item_type)
    return {name: arrow_type.field(name).type for name in value}


def _list_columns(fields: Iterable[Any], prefix: str = "") -> Iterator[str]:
    for field in fields:
        yield (name := f"{prefix}{field.name}")
        if str(field.type).startswith("struct"):
            yield from _list_columns((field.type.field(index) for index in range(field.type.num_fields)), f"{name}.")


def _import_arrow_module(name: str, path: Path) -> Any:
    """Import a module of pyarrow only when needed: it loads slowly."""
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise ConfigError(
            f"{path}: pyarrow is not installed, but {path.suffix} files need it; run launch/setup.sh, or use JSON lines"
        ) from None


@contextmanager
def _raise_arrow_errors_as_data_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    # A map may have a key twice, and a time no date in Python.
    except (KeyError, OverflowError) as error:
        raise DataError(
            f"{path}: has a value that Python cannot hold ({' '.join(str(error).split())}); save its column as text, "
            "or remove the column"
        ) from None
    # pyarrow's own errors are subclasses of these.
    except (ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())}); write the file again") from None


def _to_python(value: Any) -> Any:
    """Return an Arrow value as JSON: null is a missing field, a map is an object, dates are ISO 8601 text.

    Bytes become text if they are UTF-8 (some programs write text as bytes), else EncodedBytes.
    """
    if isinstance(value, dict):
        plain = {name: _to_python(item) for name, item in value.items()}
        # The keys of a map may be numbers or bytes.
        return {str(_to_python(name)): item for name, item in plain.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_to_python(item) for item in value]
    # JSON has no NaN and no infinities; pandas writes NaN for a missing number.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return EncodedBytes(base64.b64encode(value).decode())
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | Decimal | UUID):
        return str(value)
    return value


def _read_task_row(path: Path) -> Iterator[Row]:
    yield Row(1, "line", read_task(path))


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".jsonl.zst": _read_json_lines,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".json.zst": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".toml": _read_task_row,
}
"""Functions reading a file's rows, keyed by file extension."""
