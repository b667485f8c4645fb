"""Tests of programs, in the formats of ColossalRL, PRIME (APPS and TACO), LiveCodeBench and Prime Intellect.

- ColossalRL and PRIME: {"inputs": [...], "outputs": [...]}, or the same as JSON text. With "fn_name" a function is
  tested: each input is its arguments, a list or a text with one JSON value a line. Without "fn_name" a program is
  tested: an input is the standard input and an output the expected print-out, each a text or a list of lines.
- LiveCodeBench: [{"input", "output", "testtype": "stdin" or "functional"}, ...] or the same as JSON text, in
  `public_test_cases` and `private_test_cases` of the record. The latter may be packed. The function's name is in
  `metadata`.
- Prime Intellect: [{"input", "output", "type": "stdin_stdout" or "function_call", "fn_name"}, ...].

Keys that are not read may change what a test means (a weight, a time limit), so they are refused.

A packed list is a pickled text, compressed by zlib and encoded in base64. It is never unpickled: only the text is
extracted.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megarl.files.strict_json import RepeatedKeyError, make_object

# A small packed text may expand enormously, so stop there.
MAX_UNPACKED_BYTES = 256 << 20
_IS_CALL_BY_TYPE = {"stdin": False, "functional": True, "stdin_stdout": False, "function_call": True}
"""Whether a row's `testtype` (LiveCodeBench) or `type` (Prime Intellect) stands for a call of a function."""
_FORMS = (
    'give {"inputs": [...], "outputs": [...]}, perhaps with "fn_name", or a list of {"input": ..., "output": ...}, '
    "as the answer or in the field test_cases"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a program or a function.

    With `function`, calling it with `arguments` must return `expected`. Otherwise the program, with `stdin` as its
    input, must print `expected`. `text` is the expected value as written in the data, set if 5 may mean a text or a
    number: a function may then return either.
    """

    expected: Any
    stdin: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    text: str | None = None


def read_cases(answer: Any, record: Mapping[str, Any], field: str | None = None) -> tuple[Case, ...]:
    """Return the tests in a record's `field`, or else in test_cases, LiveCodeBench's fields, or the gold answer.

    Raises ValueError for data in an unknown format, and for tests in two places.
    """
    if field is not None:
        if field not in record:
            raise ValueError(f"the record has no field {field!r} with the program's tests (kwargs.field); {_FORMS}")
        return _parse_cases(record[field], record)
    lists = [record[name] for name in ("public_test_cases", "private_test_cases") if record.get(name)]
    if lists and record.get("test_cases"):
        raise ValueError(
            "the record has tests in test_cases and in public_test_cases or private_test_cases; name the field with "
            "the tests in kwargs.field"
        )
    if lists:
        return tuple(case for value in lists for case in _parse_cases(value, record))
    return _parse_cases(record["test_cases"] if record.get("test_cases") else answer, record)


def check_record(answer: Any, record: Mapping[str, Any], *, field: str | None = None, **kwargs: Any) -> None:
    """Raise ValueError for a record without tests. The tests are not parsed: parsing takes long."""
    names = ("public_test_cases", "private_test_cases", "test_cases") if field is None else (field,)
    if any(record.get(name) for name in names):
        return
    # Any answer except a short plain text may be (packed) tests.
    if field is None and (not isinstance(answer, str) or answer.lstrip()[:1] in ("{", "[") or len(answer) > 200):
        return
    raise ValueError(
        f"the record has no tests for a program: no field {' or '.join(names)}, and its answer is not tests; {_FORMS}"
    )


def _parse_cases(tests: Any, record: Mapping[str, Any]) -> tuple[Case, ...]:
    if isinstance(tests, str):
        tests = _parse_json(tests)
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        cases = _read_columns(tests)
    elif isinstance(tests, Sequence) and not isinstance(tests, str):
        name = _read_function_name(record.get("metadata"))
        cases = tuple(_read_row(row, name) for row in tests)
    else:
        raise ValueError(f"the record's tests have an unknown format: {tests!r:.80}; {_FORMS}")
    if not cases:
        raise ValueError(f"the record's list of tests is empty; {_FORMS}")
    return cases


def _read_columns(tests: Mapping[str, Any]) -> tuple[Case, ...]:
    """Return the tests of an object with the lists `inputs` and `outputs`."""
    _refuse_unread_keys(tests, "inputs", "outputs", "fn_name")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the fields inputs and outputs of the record's tests must be lists of equal length")
    function = tests.get("fn_name")
    return tuple(
        _make_case(test_input, expected, function) for test_input, expected in zip(inputs, outputs, strict=True)
    )


def _read_row(row: Any, function_name: str | None) -> Case:
    """Return the test of one row: a call of a function, or a program's input and output."""
    if not isinstance(row, Mapping) or "input" not in row or "output" not in row:
        raise ValueError(f"a test in the record is not an object with input and output: {row!r:.80}; {_FORMS}")
    _refuse_unread_keys(row, "input", "output", "testtype", "type", "fn_name", "metadata")
    function_name = row.get("fn_name") or _read_function_name(row.get("metadata")) or function_name
    is_call = function_name is not None
    for key in ("testtype", "type"):
        if row.get(key) is not None:
            # A list or an object cannot be a key.
            if not isinstance(row[key], str) or row[key] not in _IS_CALL_BY_TYPE:
                raise ValueError(f"a test's {key} is {row[key]!r:.80}; give one of {', '.join(_IS_CALL_BY_TYPE)}")
            is_call = _IS_CALL_BY_TYPE[row[key]]
    if is_call and function_name is None:
        raise ValueError(
            "a test that calls a function has no function name; set fn_name in the test, or func_name in the record's "
            "metadata"
        )
    return _make_case(row["input"], row["output"], function_name if is_call else None)


def _refuse_unread_keys(tests: Mapping[str, Any], *read_keys: str) -> None:
    for key, value in tests.items():
        if key not in read_keys and value is not None:
            raise ValueError(f"the record's tests have a key {key!r:.80} that is not read; remove it")


def _make_case(test_input: Any, expected: Any, function: Any) -> Case:
    """Return a test of a function if `function` is set, otherwise of a whole program."""
    if not function:
        return Case(_join_lines(expected), _join_lines(test_input))
    if not isinstance(function, str):
        raise ValueError(f"the tests' fn_name is {function!r:.80}; set it to the name of the function to test")
    if isinstance(test_input, str):
        lines = (line for line in test_input.splitlines() if line.strip())
        arguments = tuple(json.loads(line, object_pairs_hook=make_object) for line in lines)
    elif isinstance(test_input, list):
        arguments = tuple(test_input)
    else:
        raise ValueError(
            f"a test's input for {function} is {test_input!r:.80}; give a list of arguments, or a text with one "
            "JSON value a line"
        )
    # The expected result may be JSON or plain text. `text` keeps one that may be either.
    text = None
    if isinstance(expected, str):
        try:
            json_value = json.loads(expected, parse_float=_read_finite, object_pairs_hook=make_object)
        except RepeatedKeyError:
            raise
        except ValueError:  # Not JSON: it is a plain text.
            return Case(expected, function=function, arguments=arguments)
        # Quotes and brackets show that JSON is meant, so only other texts are ambiguous.
        text = None if isinstance(json_value, str | list | dict) else expected
        expected = json_value
    return Case(expected, function=function, arguments=arguments, text=text)


def _read_finite(digits: str) -> float:
    """Return a JSON number as float. Raises ValueError for infinity: different huge numbers would be equal."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:80]} in a test is too large for a float")
    return value


def _join_lines(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    if any(line is None or isinstance(line, list | Mapping) for line in lines):
        raise ValueError(f"a program's input or output is {value!r:.80}; give a text or a list of lines")
    return "\n".join(map(str, lines))


def _read_function_name(metadata: Any) -> str | None:
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata, object_pairs_hook=make_object)
        except RepeatedKeyError as error:
            raise ValueError(f"the metadata of a test: {error}; give it once") from None
        except ValueError:
            return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) and name else None


def _parse_json(text: str) -> Any:
    """Return the tests from JSON text, or from JSON that is packed as by LiveCodeBench."""
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RepeatedKeyError as error:
        raise ValueError(f"the record's tests: {error}; give it once") from None
    except ValueError:
        pass
    try:
        return json.loads(_unpack_text(text), object_pairs_hook=make_object)
    except RepeatedKeyError as error:
        raise ValueError(f"the record's tests: {error}; give it once") from None
    except ValueError:
        raise ValueError(f"the record's tests are not JSON: {text[:80]!r}; {_FORMS}") from None


@lru_cache(maxsize=8)
def _unpack_text(text: str) -> str:
    """Return the text in a pickle compressed by zlib and encoded in base64.

    The pickle is not executed. Raises ValueError if it holds anything but one text.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError("the record's packed tests exceed 256 MiB when unpacked")
        # `genops` only lists the pickle's operations. A text is the argument of one of the UNICODE operations.
        texts = [argument for operation, argument, _ in pickletools.genops(data) if "UNICODE" in operation.name]
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("the record's packed tests hold something other than one text")
    return texts[0]
