"""Downloads from and uploads to the Hub, by the real huggingface_hub against a stand-in on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

from megarl.data.sources.rows import hub_data_set, missing_data_set
from megarl.files import hub
from megarl.files.hub import cached_folder, check_push, download, push
from megarl.files.model_folder import UNREAD
from megarl.types import ConfigError, DataError, StorageError
from tests.stand_ins.hub_server import TOKEN, Hub, hub_server

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"more weights"}
DATA = {"main/train-00000-of-00001.jsonl": b"{}\n", "other/train-00000-of-00001.jsonl": b"{}\n"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in used by this process, with an empty cache and a token."""
    with hub_server() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = f"{served.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        cached_folder.cache_clear()
        yield served
        cached_folder.cache_clear()


def folder_of(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def test_a_model_is_downloaded_once_without_files_that_are_not_read(server: Hub) -> None:
    server.add("model", "me/tiny", FILES)
    assert cached_folder("me/tiny", "model", without=UNREAD) is None
    folder = download("me/tiny", "model", without=UNREAD)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: content for name, content in FILES.items() if name != "pytorch_model.bin"
    }
    count = len(server.requests)
    assert cached_folder("me/tiny", "model", without=UNREAD) == folder
    # With the other file the model is not complete.
    assert cached_folder("me/tiny", "model") is None and len(server.requests) == count


def test_one_folder_of_a_data_set_is_enough(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server.add("dataset", "me/sums", DATA)
    missing = missing_data_set("train@me/sums/main")
    assert missing == ("me/sums", ("main", "main/*")) and hub_data_set("train@me/sums/main") is None
    folder = download("me/sums", "dataset", only=missing.only if missing else None)
    assert [path.name for path in folder.iterdir()] == ["main"]
    assert missing_data_set("train@me/sums/main") is None and hub_data_set("train@me/sums/main") == "me/sums"
    assert missing_data_set("me/sums/other") == ("me/sums", ("other", "other/*"))
    assert missing_data_set("train@me/sums") == ("me/sums", None)
    # A file, and a path in a folder that exists, are local.
    (tmp_path / "me").mkdir()
    assert missing_data_set("train@me/sums") is None and missing_data_set("you/sums.jsonl") is None


def test_a_failed_download_says_why(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no model of this name, or it is private or gated: then set HF_TOKEN"):
        download("me/absent", "model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DataError, match="the Hub cannot be reached from here"):
        download("me/absent", "dataset")


def test_a_folder_is_pushed_in_one_commit(server: Hub, tmp_path: Path) -> None:
    shards = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    first = folder_of(tmp_path / "first", {"config.json": b"{}", **shards, ".cache/x": b"", "best.json": b"{}"})
    done = push(first, "me/tiny", "one", is_private=True, without=("best.json",))
    repository = server.repositories["model", "me/tiny"]
    assert repository.private and list(repository.commits.values()) == ["initial commit", "one"]
    assert done == ("me/tiny", repository.head)
    assert {*repository.files} == {".gitattributes", "config.json", *shards}
    # An older shard would be read in place of the newer file.
    second = folder_of(tmp_path / "second", FILES)
    assert push(second, "me/tiny", "two", is_private=True).commit == repository.head
    assert repository.files == {".gitattributes": b"", **FILES} and [*repository.commits.values()][2:] == ["two"]


def test_a_push_is_refused_before_anything_is_sent(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny", "me/tiny/more", "me/a--b", "../tiny", "me/" + "x" * 100):
        with pytest.raises(ConfigError, match=r"^--push-to-hub .*: not a name on the Hub; write OWNER/NAME"):
            check_push("--push-to-hub", name)
    check_push("--push-to-hub", "me/tiny")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"^--push-to-hub me/tiny: there is no token .* set HF_TOKEN"):
        check_push("--push-to-hub", "me/tiny")
    assert server.requests == []


def test_a_private_push_to_a_public_repository_is_refused(server: Hub, tmp_path: Path) -> None:
    public = server.add("model", "me/open", FILES)
    with pytest.raises(ConfigError, match="--private: me/open exists on the Hub and is public"):
        push(folder_of(tmp_path / "model", FILES), "me/open", "secret", is_private=True)
    assert len(public.commits) == 1


def test_a_wrong_token_fails_the_push(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong_one")
    with pytest.raises(StorageError, match=r"the upload to me/tiny failed .*Check network, token") as error:
        push(folder_of(tmp_path / "model", FILES), "me/tiny", "one", is_private=False)
    assert "hf_wrong_one" not in str(error.value) and server.repositories == {}


def test_a_card_that_the_hub_refuses_is_not_committed(server: Hub, tmp_path: Path) -> None:
    broken = folder_of(tmp_path / "model", {**FILES, "README.md": b"---\n[1, 2]\n---\n"})
    with pytest.raises(StorageError, match=r"Invalid metadata in README\.md"):
        push(broken, "me/tiny", "one", is_private=False)
    assert [*server.repositories["model", "me/tiny"].commits.values()] == ["initial commit"]


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    taken = {text: hub.names_repository(text) for text in ("me/tiny", "models/tiny", "tiny", "a/b/c", "/a/b")}
    assert taken == {"me/tiny": True, "models/tiny": False, "tiny": False, "a/b/c": False, "/a/b": False}
    assert json.dumps(hub.download_command("me/sums", "dataset")) == '"hf download me/sums --repo-type dataset"'
