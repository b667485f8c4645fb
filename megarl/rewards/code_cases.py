"""Tests of programs in the formats of ColossalRL, PRIME (APPS and TACO) and LiveCodeBench.

- ColossalRL and PRIME: {"inputs": [...], "outputs": [...]}, or its JSON. With "fn_name" a function is called. An input
  is then its arguments: a list, or a text with one JSON value a line. Without it an input is the standard input and an
  output the expected print-out, each a text or a list of lines.
- LiveCodeBench: [{"input", "output", "testtype": "stdin" or "functional"}, ...] or its JSON, in `public_test_cases` and
  `private_test_cases` of the record, the latter possibly packed. The function's name is in `metadata`.

A packed list is base64 of zlib of a pickle of a text. It is never unpickled: only the text is read from it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# A small packed text may expand enormously, so stop there.
MAX_UNPACKED_BYTES = 256 << 20
_FORMS = (
    'give {"inputs": [...], "outputs": [...]}, perhaps with "fn_name", or a list of {"input": ..., "output": ...}, '
    "as the answer or in the field test_cases"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A test. With `function`, its `arguments` must give the value `expected`; else `stdin` must make a program print
    it.

    `text` is the expected value as written, if the data do not say whether it is a text such as "5" or the value it
    spells. A function may return either.
    """

    expected: Any
    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    text: str | None = None


def read_cases(answer: Any, record: Mapping[str, Any], field: str | None = None) -> tuple[Case, ...]:
    """Return the tests of a sample: from a field of the record, else from its test_cases, LiveCodeBench's fields, or
    the answer.

    Raises ValueError for data in an unknown format.
    """
    if field is not None:
        if field not in record:
            raise ValueError(f"the record has no field {field!r}; {_FORMS}")
        return _cases(record[field], record)
    lists = [record[name] for name in ("public_test_cases", "private_test_cases") if record.get(name)]
    if lists:
        return tuple(case for value in lists for case in _cases(value, record))
    return _cases(record["test_cases"] if record.get("test_cases") else answer, record)


def check_record(answer: Any, record: Mapping[str, Any], *, field: str | None = None, **kwargs: Any) -> None:
    """Raise ValueError for a record without tests. Existing tests are not parsed, because that takes long."""
    names = ("public_test_cases", "private_test_cases", "test_cases") if field is None else (field,)
    if any(record.get(name) for name in names):
        return
    # Anything but a short plain text may be (packed) tests.
    if field is None and (not isinstance(answer, str) or answer.lstrip()[:1] in ("{", "[") or len(answer) > 200):
        return
    raise ValueError(f"the record has no {' nor '.join(names)}, and no tests as its answer; {_FORMS}")


def _cases(value: Any, record: Mapping[str, Any]) -> tuple[Case, ...]:
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        found = _columns(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        name = _function_name(record.get("metadata"))
        found = tuple(_row(row, name) for row in value)
    else:
        raise ValueError(f"tests are {value!r:.80}; {_FORMS}")
    if not found:
        raise ValueError(f"the record has no test for its program; {_FORMS}")
    return found


def _columns(value: Mapping[str, Any]) -> tuple[Case, ...]:
    inputs, outputs = value["inputs"], value["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs of tests must be lists of equal length")
    function = value.get("fn_name")
    return tuple(_case(given, expected, function) for given, expected in zip(inputs, outputs, strict=True))


def _row(row: Any, name: str | None) -> Case:
    if not isinstance(row, Mapping) or "input" not in row or "output" not in row:
        raise ValueError(f"a test is not an object with input and output: {row!r:.80}; {_FORMS}")
    name = _function_name(row.get("metadata")) or name
    is_call = row.get("testtype") == "functional" or ("testtype" not in row and name is not None)
    if is_call and name is None:
        raise ValueError("a functional test without func_name in its metadata")
    return _case(row["input"], row["output"], name if is_call else None)


def _case(given: Any, expected: Any, function: Any) -> Case:
    if not function:
        return Case(_text(expected), _text(given))
    if not isinstance(function, str):
        raise ValueError(f"fn_name is {function!r:.80}, not a name")
    if isinstance(given, str):
        arguments = tuple(json.loads(line) for line in given.splitlines() if line.strip())
    elif isinstance(given, list):
        arguments = tuple(given)
    else:
        raise ValueError(f"an input of {function} is {given!r:.80}; give a list of arguments, or one a line as JSON")
    text = None
    if isinstance(expected, str):
        with suppress(ValueError):  # Not JSON: it is a plain text.
            parsed = json.loads(expected, parse_float=_finite)
            # Quotes or brackets are JSON on purpose, so only other texts are ambiguous.
            text = None if isinstance(parsed, str | list | dict) else expected
            expected = parsed
    return Case(expected, function=function, arguments=arguments, text=text)


def _finite(digits: str) -> float:
    """Return the value of a JSON number. Raises ValueError if it exceeds all floats: all such numbers would be
    equal."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is beyond all floats")
    return value


def _text(value: Any) -> str:
    """Return a text, or a list of lines joined into one."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _function_name(metadata: Any) -> str | None:
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) and name else None


def _parsed(text: str) -> Any:
    """Return the value of JSON, or of LiveCodeBench's packed JSON."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(_unpacked(text))
    except ValueError:
        raise ValueError(f"tests are {text[:80]!r}, not JSON; {_FORMS}") from None


@lru_cache(maxsize=8)
def _unpacked(text: str) -> str:
    """Return the text in a pickle packed by zlib and base64.

    Nothing is executed. Raises ValueError for anything but a text.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError("packed tests are too large")
        # `genops` only lists the pickle's operations. A text is the argument of one of the UNICODE operations.
        found = [argument for operation, argument, _ in pickletools.genops(data) if "UNICODE" in operation.name]
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if len(found) != 1 or not isinstance(found[0], str):
        raise ValueError("packed tests are not a text")
    return found[0]
