"""Lines of the journal of agents' attempts: their format, and a reader with checks.

A line is a CRC-32 and a JSON object. It is checked before use, because other programs can write to the file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.files.atomic import raise_storage_errors
from megarl.files.strict_json import LARGE, loads
from megarl.types import Completion, DataError, RetainedSets

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_LINE = 1 << 28
"""Largest accepted line, in bytes. A million tokens take 16 MB."""
_REMEDY = "Restore the file from a copy, or remove it: attempts since the checkpoint are then sampled again."


def encode_line(values: Mapping[str, Any]) -> bytes:
    # JSON escapes all line separators of ASCII, so no text can end the line.
    content = json.dumps(values, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the record of each line. An incomplete last line, left by a kill, is skipped.

    Raises DataError for a damaged line, StorageError if the file cannot be read.
    """
    with raise_storage_errors(file), file.open("rb") as lines:
        line_number = 0
        while line := lines.readline(_MAX_LINE):
            line_number += 1
            values = _decode_line(line)
            if values is not None:
                yield line_number, values
            # Only a last line without a line feed is skipped, because a kill cut it.
            elif line.endswith(b"\n") or len(line) == _MAX_LINE:
                raise make_damage_error(file, line_number, "the line's checksum is wrong")


def make_damage_error(file: Path, line_number: int, reason: str) -> DataError:
    return DataError(f"{file}:{line_number}: {reason}. {_REMEDY}")


def _decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None: the line is damaged or cut short."""
    checksum, _, content = line.rstrip(b"\n").partition(b" ")
    # Verify the checksum before the parser sees the content.
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    try:
        values = loads(content, LARGE)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def prompt_digest(prompt: NDArray[np.int32]) -> str:
    """Return a hash of a prompt's tokens [prompt]."""
    # 128 bits are enough to distinguish all prompts of a run.
    return hashlib.sha256(prompt.tobytes()).hexdigest()[:32]


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON values, without routed experts: these are stored on their rank."""
    sets = completion.retained_sets
    return {
        "tokens": _encode_array(completion.token_ids, np.int32),
        "logprobs": _encode_array(completion.rollout_logprobs, np.float32),
        "versions": _encode_array(completion.weight_versions, np.int32),
        "sets": None
        if sets is None
        else [_encode_array(sets.counts, np.int32), _encode_array(sets.token_ids, np.int32)],
        "finish": completion.finish_reason,
    }


def read_completion(
    request_id: str, values: Mapping[str, Any], finish_reasons: tuple[str, ...] = ("stop", "length")
) -> Completion:
    """Return the completion written by `completion_values`, with one of the `finish_reasons`.

    Raises ValueError, TypeError or LookupError if invalid.
    """
    token_ids, logprobs = decode_tokens(values["tokens"]), _decode_array(values["logprobs"], np.float32)
    versions = decode_tokens(values["versions"])
    if not len(token_ids) == len(logprobs) == len(versions):
        raise ValueError("tokens, log-probs and weight versions differ in number")
    # The log-prob of a sampled token is at most 0, up to rounding.
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise ValueError("a log-prob is not that of a sampled token")
    if values["finish"] not in finish_reasons:
        raise ValueError("the completion has no end")
    sets = None
    if values["sets"] is not None:
        counts, set_tokens = map(decode_tokens, values["sets"])
        if len(counts) != len(token_ids) or counts.sum() != len(set_tokens):
            raise ValueError("the retained token sets of top-p or top-k are not one set per sampled token")
        sets = RetainedSets(counts, set_tokens)
    return Completion(
        request_id, token_ids.astype(np.int64), logprobs, values["finish"], versions, retained_sets=sets
    )  # fmt: skip


def encode_tokens(token_ids: NDArray[Any]) -> str:
    return _encode_array(token_ids, np.int32)


def decode_tokens(text: Any) -> NDArray[np.int32]:
    """Return the int32 numbers [tokens] in a base64 text. Raises ValueError or TypeError for other text or negative
    numbers.
    """
    numbers = _decode_array(text, np.int32)
    if (numbers < 0).any():
        raise ValueError("a number is negative")
    return numbers


def _encode_array(array: NDArray[Any], dtype: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def _decode_array(base64_text: Any, dtype: Any) -> NDArray[Any]:
    if not isinstance(base64_text, str):
        raise TypeError("an array is not text")
    try:
        content = base64.b64decode(base64_text, validate=True)
    except binascii.Error as error:
        raise ValueError("an array is not base64") from error
    # Copy: an array over bytes is read-only, but later steps may change its values.
    return np.frombuffer(content, dtype).copy()


def read_count(value: Any) -> int:
    # Not `isinstance`: it would accept true and false as integers.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value
