"""Equal content of a model folder is tried once in a process; any change of it is tried."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from megarl.data.chat import load_tokenizer
from megarl.data.tokenizers import trials
from megarl.data.tokenizers.trials import digest_of_folder, find_trial_fault
from megarl.processes.process_tree import FaultyInputError


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder whose content no other test has."""
    folder = shutil.copytree(tiny_model(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "notes.txt").write_text(str(uuid4()))
    return folder


def test_a_tokenizer_is_tried_again_after_a_change_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    fault_of = trials.fault_of

    def count(*arguments: Any, **limits: Any) -> str | None:
        nonlocal tried
        tried += 1
        return fault_of(*arguments, **limits)

    monkeypatch.setattr(trials, "fault_of", count)
    load_tokenizer(folder)
    # The rules may have passed in an earlier test: they are those of every tiny model.
    first, tried = tried, 0
    assert first >= 2
    load_tokenizer(folder)
    assert tried == 0
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{# changed #}")
    load_tokenizer(folder)
    assert tried == 2
    load_tokenizer(folder, template="plain")
    assert tried == 3


def test_each_file_but_weights_changes_the_digest(folder: Path) -> None:
    before = digest_of_folder(folder)
    (folder / "model.safetensors").write_text("weights")
    assert digest_of_folder(folder) == before
    digests = {before}
    for name, text in (("notes.txt", "other"), ("new.json", "{}"), ("additional_chat_templates/tools.jinja", "x")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        digests.add(digest_of_folder(folder))
    (folder / "new.json").rename(folder / "newer.json")
    digests.add(digest_of_folder(folder))
    assert len(digests) == 5


def test_a_name_that_is_not_valid_utf_8_changes_the_digest(folder: Path) -> None:
    before = digest_of_folder(folder)
    (folder / os.fsdecode(b"caf\xe9.txt")).touch()
    after = digest_of_folder(folder)
    # A random digest would differ each time.
    assert after != before and after == digest_of_folder(folder)


def test_a_folder_that_cannot_be_read_equals_none(tmp_path: Path) -> None:
    assert digest_of_folder(tmp_path / "absent") != digest_of_folder(tmp_path / "absent")


def test_a_fault_is_found_each_time() -> None:
    def fail() -> None:
        raise FaultyInputError("is broken")

    def fault(content: Sequence[str], work: Callable[[], object]) -> str | None:
        return find_trial_fault(content, work, seconds=5.0, memory_bytes=1 << 28)

    content = ("kind", str(uuid4()))
    assert fault(content, fail) == fault(content, fail) == "is broken"
    assert fault(content, lambda: None) is None
    assert fault((*content, "more"), fail) == "is broken"
