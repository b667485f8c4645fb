"""Rows of every kind of file, of folders, and of data sets in the Hub's cache."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.reader import read_records
from megarl.data.sources.rows import data_files
from megarl.files import hub
from megarl.types import DataError

RECORDS: list[dict[str, Any]] = [{"prompt": f"say, {n}", "answer": str(n)} for n in (2, 3, 5, 7)]


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    """The records in the format that the path's ending names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    elif path.suffix == ".csv":
        cells = [list(records[0]), *([str(value) for value in record.values()] for record in records)]
        path.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in cells))
    elif path.suffix in (".parquet", ".arrow"):
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        table = pa.Table.from_pylist(records)
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(table, path, row_group_size=3)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    else:
        path.write_text(lines(records))
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"])
def test_each_kind_of_file_has_the_same_records(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"data{ending}")
    read = list(read_records(path))
    assert [record.fields for record in read] == RECORDS
    first = 2 if ending == ".csv" else 1  # its header is a line
    assert [record.line for record in read] == [first + place for place in range(4)]
    assert read[1].unit == {".json": "record", ".parquet": "row", ".arrow": "row"}.get(ending, "line")


def test_json_lines_may_end_in_json_and_arrow_has_a_format_of_files_too(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text("\n" + lines(RECORDS))
    assert [record.fields for record in read_records(tmp_path / "lines.json")] == RECORDS
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pa.Table.from_pylist(RECORDS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert [record.fields for record in read_records(tmp_path / "a.arrow")] == RECORDS


def test_values_of_arrow_are_those_of_json(tmp_path: Path) -> None:
    """A struct of Arrow has all fields that any row has: those that are null were missing."""
    day, none = datetime.date(2024, 2, 29), None
    records = [
        {"m": [{"role": "user", "calls": none}], "d": day, "x": float("nan"), "p": Decimal("1.50"), "b": b"\x00\xff"},
        {"m": [{"role": "assistant", "calls": ["f"]}], "d": none, "x": 0.5, "p": none, "b": none},
    ]
    read = [record.fields for record in read_records(write(tmp_path / "data.parquet", records))]
    assert read == [
        {"m": [{"role": "user"}], "d": "2024-02-29", "p": "1.50", "b": "AP8="},
        {"m": [{"role": "assistant", "calls": ["f"]}], "x": 0.5},
    ]
    assert json.loads(json.dumps(read)) == read


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_numbers_of_fewer_bits_keep_their_decimals(tmp_path: Path, ending: str) -> None:
    """In 32 bits 0.1 is 0.10000000149011612: no answer would equal such a gold answer."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    single = pa.float32()
    columns = {
        "answer": pa.array([0.1, None], single),
        "level": pa.array(np.array([0.7, np.nan], np.float16)),
        "inner": pa.array([{"y": [0.3, None], "z": 0.30000001192092896}, None],
                          pa.struct([("y", pa.list_(single)), ("z", pa.float64())])),
        "map": pa.array([[("k", 0.1)], None], pa.map_(pa.string(), single)),
        "category": pa.array([0.1, None], single).dictionary_encode(),
        "embedding": pa.array([[0.1] * 65, None], pa.list_(single)),
    }  # fmt: skip
    table, path = pa.table(columns), tmp_path / f"data{ending}"
    if ending == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    inner = {"y": [0.3, None], "z": 0.30000001192092896}
    expected = {"answer": 0.1, "level": 0.7, "inner": inner, "map": {"k": 0.1}, "category": 0.1}
    # Nothing reads the numbers of an embedding: a conversion of a million rows would take minutes.
    expected["embedding"] = [float(np.float32(0.1))] * 65
    assert [record.fields for record in read_records(path)] == [expected, {}]


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("first", "second", "format"),
    [
        ({"messages": "a", "level": "x"}, {"answer": "1"}, "rl2"),
        ({"prompt": "a", "completion": "x"}, {"label": "1"}, "trl"),
        ({"context": "a", "answer": "x"}, {"gt_answer": "1"}, "colossalrl"),
        ({"prompt": "a", "data_source": "x"}, {"reward_model": {"ground_truth": "1"}}, "verl"),
    ],
)
def test_a_format_is_recognised_by_columns_that_are_empty_at_first(
    tmp_path: Path, ending: str, first: dict[str, Any], second: dict[str, Any], format: str
) -> None:
    if ending == ".csv" and format == "verl":
        second = {"reward_model.ground_truth": "1"}
    path = write(tmp_path / f"data{ending}", [first | dict.fromkeys(second), first | second])
    if ending == ".csv":
        path.write_text(path.read_text().replace('"None"', ""))
    read = list(read_records(path))
    assert [record.fields for record in read] == [first, first | second]
    assert {record.format.name for record in read} == {format}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.json", "[{}, ", "a.json: not valid JSON", id="cut JSON"),
        pytest.param("a.json", "[1]", "record 1: 1 is not a JSON object", id="numbers"),
        pytest.param("a.json", "[]", "holds no record", id="empty list"),
        pytest.param("a.csv", "a,a\n1,2\n", "line 1: the columns", id="a column twice"),
        pytest.param("a.csv", "a,b\n1,2\n1,2,3\n", "line 3: has 3 cells, the header has 2", id="too many cells"),
        pytest.param("a.csv", 'a\n"1\n', "not valid CSV", id="open quotes"),
        pytest.param("a.csv", "a,b\n", "holds no record", id="a header alone"),
    ],
)
def test_faulty_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("is_file", [True, False])
def test_offsets_outside_of_an_arrow_file_are_refused(tmp_path: Path, is_file: bool) -> None:
    """Unchecked, the text of the second row would be read far behind the file's end, which crashes the process."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = tmp_path / "a.arrow"
    table = pa.table({"question": ["12345", "1234567"], "answer": ["6", "7"]})
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write(table)
    assert len(list(read_records(path))) == 2
    offsets, damaged = (np.array(values, "<i4").tobytes() for values in ([0, 5, 12], [0, 5, 2**30]))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, damaged))
    with pytest.raises(DataError, match=r"a.arrow: cannot be read \(.*offset"):
        list(read_records(path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_files_that_are_not_what_they_end_in(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / name).write_bytes(b"PAR1 not quite")
    with pytest.raises(DataError, match=rf"{name}: cannot be read"):
        list(read_records(tmp_path / name))


def test_a_folder_of_shards(tmp_path: Path) -> None:
    write(tmp_path / "d" / "data-00001-of-00002.jsonl", RECORDS[2:])
    write(tmp_path / "d" / "data-00000-of-00002.jsonl", RECORDS[:2])
    (tmp_path / "d" / "dataset_info.json").write_text("{}")
    (tmp_path / "d" / "README.md").write_text("# data")
    write(tmp_path / "d" / ".cache" / "old.jsonl")
    assert [record.fields for record in read_records(tmp_path / "d")] == RECORDS


def test_splits_of_a_folder(tmp_path: Path) -> None:
    for split, records in (("train", RECORDS[:3]), ("test", RECORDS[3:])):
        write(tmp_path / "named" / "data" / f"{split}-00000-of-00001.jsonl", records)
        write(tmp_path / "folders" / split / "data-00000-of-00001.jsonl", records)
    write(tmp_path / "named" / "data" / "train_sft.jsonl")
    for folder in ("named", "folders"):
        assert [r.fields for r in read_records(f"train@{tmp_path / folder}")] == RECORDS[:3]
        assert [r.fields for r in read_records(f"test@{tmp_path / folder}")] == RECORDS[3:]
        with pytest.raises(DataError, match="has several splits, test, train; name one: test@"):
            data_files(tmp_path / folder)
        with pytest.raises(DataError, match="has no split 'dev'; it has test, train"):
            data_files(f"dev@{tmp_path / folder}")
    with pytest.raises(DataError, match="is one file, so it has no splits"):
        data_files(f"train@{tmp_path / 'named/data/train_sft.jsonl'}")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
        ("train_prefs-00000-of-00001.jsonl", "test_prefs-00000-of-00001.jsonl"),
        ("train-1.jsonl", "valid-1.jsonl"),
        ("sums.train.jsonl", "sums.dev.jsonl"),
        ("sums_train/a.jsonl", "sums_eval/a.jsonl"),
    ],
)
def test_splits_that_are_words_in_names(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / train, RECORDS[:3])
    write(tmp_path / test, RECORDS[3:])
    with pytest.raises(DataError, match=r"has several splits, .*; name one: \w+@"):
        data_files(tmp_path)
    assert [r.fields for r in read_records(f"train@{tmp_path}")] == RECORDS[:3]


def test_words_within_a_name_are_no_split_and_parts_are_one_set(tmp_path: Path) -> None:
    for name in ("trainer.jsonl", "my-test-cases.jsonl", "sums_train-1.jsonl", "sums_train-2.jsonl"):
        write(tmp_path / name)
    assert len(data_files(tmp_path)) == 4
    assert [file.name for file in data_files(f"train@{tmp_path}")] == ["sums_train-1.jsonl", "sums_train-2.jsonl"]
    write(tmp_path / "products_train.jsonl")
    with pytest.raises(
        DataError, match="the split train could mean several files or folders, products_train, sums_train; name one"
    ):
        data_files(f"train@{tmp_path}")
    assert len(data_files(f"sums_train@{tmp_path}")) == 2


def test_missing_shards_are_named(tmp_path: Path) -> None:
    for number in (0, 3):
        write(tmp_path / f"train-{number:05d}-of-00004-ab{number}.jsonl")
    with pytest.raises(
        DataError, match=r"of the 4 shards train-\*-of-00004, these are missing: 00001, 00002; download"
    ):
        data_files(tmp_path)
    write(tmp_path / "from-one" / "train-00001-of-00001.jsonl")
    assert len(data_files(tmp_path / "from-one")) == 1
    write(tmp_path / "from-one" / "train-00000-of-00001.jsonl").rename(
        tmp_path / "from-one" / "train-00000-of-00002.jsonl"
    )
    with pytest.raises(
        DataError, match=r"train exists in several sets of shards, -of-00002, -of-00001; remove all but one"
    ):
        data_files(tmp_path / "from-one")


def test_intermediate_results_of_datasets_are_no_data(tmp_path: Path) -> None:
    for name in ("cache-1a2b.arrow", "tmpx1y2.arrow", "data-00000-of-00001.arrow"):
        (tmp_path / name).touch()
    assert [file.name for file in data_files(tmp_path)] == ["data-00000-of-00001.arrow"]


def test_a_compressed_copy_beside_its_file_is_no_data(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).touch()
    assert [file.name for file in data_files(tmp_path)] == ["a.jsonl"]
    (tmp_path / "b.jsonl.gz").touch()
    with pytest.raises(DataError, match=r"several kinds, \.jsonl, \.jsonl\.gz"):
        data_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["b.ndjson", "b.tsv", "b.pq", "inner/b.JSONL.bz2", "b.csv.gz", "b.parquet.zst", "train.tsv.xz"]
)
def test_a_folder_with_records_in_an_unread_format_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "train.jsonl")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"also has {name}, which is not read; convert it to \.jsonl"):
        data_files(tmp_path)


def test_unread_files_without_other_records_are_left_out(tmp_path: Path) -> None:
    for name in ("train.jsonl", "train.jsonl.bz2", "README.md", "images.zip", ".cache/a.tsv", "test.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [file.name for file in data_files(f"train@{tmp_path}")] == ["train.jsonl"]


def test_configurations_are_not_mixed(tmp_path: Path) -> None:
    for folder in ("main", "socratic"):
        write(tmp_path / "train" / folder / "a.jsonl")
        write(tmp_path / "several" / folder / "train-00000-of-00001.jsonl")
    home = tmp_path / "several"
    with pytest.raises(DataError, match=rf"several configurations: {home}/main, {home}/socratic; give one"):
        data_files(f"train@{home}")
    assert len(data_files(f"train@{home}/main")) == 1
    assert len(data_files(tmp_path / "train")) == 2


def test_folders_that_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data files"):
        data_files(tmp_path)
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.csv")
    with pytest.raises(DataError, match=r"several kinds, \.csv, \.jsonl"):
        data_files(tmp_path)


def test_a_data_set_of_the_hub_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are those that `hf download` makes."""
    cache = tmp_path / "cache"
    repository = cache / "datasets--megarl-tests--sums"
    write(repository / "snapshots" / "abc" / "main" / "train-00000-of-00001.jsonl")
    write(repository / "snapshots" / "abc" / "main" / "test-00000-of-00001.jsonl", RECORDS[:1])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache))
    hub.cached_folder.cache_clear()
    try:
        assert [r.fields for r in read_records("train@megarl-tests/sums/main")] == RECORDS
        assert [r.fields for r in read_records("test@megarl-tests/sums")] == RECORDS[:1]
        write(repository / "snapshots" / "abc" / "other-words" / "train-00000-of-00001.jsonl")
        with pytest.raises(DataError, match=r"megarl-tests/sums/main, megarl-tests/sums/other-words; give one"):
            data_files("train@megarl-tests/sums")
        with pytest.raises(DataError, match="the data set megarl-tests/sums has no file or folder other"):
            data_files("megarl-tests/sums/other")
        with pytest.raises(DataError, match="hf download megarl-tests/products --repo-type dataset"):
            data_files("train@megarl-tests/products")
        with pytest.raises(DataError, match=r"^data/train\.jsonl: no such file; check the path$"):
            data_files("data/train.jsonl")
    finally:
        hub.cached_folder.cache_clear()
