"""Tries tokenizers and chat templates in a forked process, once for equal content.

A driver loads its tokenizer two or three times, each time with three trials. With torch in memory, the fork for one
trial takes 0.05 to 0.15 s of CPU time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.files.model_folder import WEIGHTS
from megarl.processes.process_tree import fault_of

_passed: set[bytes] = set()
"""Digests of contents that passed their trial in this process."""


def digest_of_folder(folder: Path) -> str:
    """Return a digest of the files that decide a tokenizer's behaviour: all files of a model folder except weights.

    If a file cannot be read, the digest equals no other one.
    """
    digest = hashlib.sha256()
    templates = folder / "additional_chat_templates"
    try:
        for path in sorted([*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]):
            if path.suffix not in WEIGHTS and path.is_file():
                # In chunks, because a folder may hold large files of other programs. Both digests have a fixed length,
                # so that files with other names and contents never give the same bytes. A name may be invalid UTF-8.
                digest.update(hashlib.sha256(os.fsencode(path.relative_to(folder))).digest())
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return os.urandom(32).hex()
    return digest.hexdigest()


def find_trial_fault(
    content: Sequence[str], work: Callable[[], object], *, seconds: float, memory_bytes: int
) -> str | None:
    """Return the fault of `work` in a forked process. None: `work` stays within its limits.

    `content` is the input of `work`, beginning with the kind of the trial. Content that passed in this process is not
    tried again, because `work` is deterministic.
    """
    key = hashlib.sha256(json.dumps(content).encode()).digest()
    if key in _passed:
        return None
    fault = fault_of(work, seconds=seconds, memory_bytes=memory_bytes)
    if fault is None:
        _passed.add(key)
    return fault
