from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from megarl.files.strict_json import LARGE, MAX_DEPTH, MEDIUM, SMALL, count_values, loads, parse


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"a": [1, 2.5, null, true], "b": {"c": "d"}}', {"a": [1, 2.5, None, True], "b": {"c": "d"}}),
        (b"\xef\xbb\xbf[]", []),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\\ud800"', "\\ud800"),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b"[" + b"[]," * 500 + b"[]]", [[]] * 501),
        # Exponents beyond the limits of `Decimal`.
        (b"[1e-9999999999999999999999, 0e9999999999999999999999]", [0.0, 0.0]),
    ],
)
def test_sound_texts(content: bytes, value: object) -> None:
    assert value is None or parse(content) == value


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b'{"a": 1, "b": {"x": 1, "x": 2}}', 'the key "x" occurs twice', id="key twice"),
        pytest.param(b'{"a": NaN}', "NaN is not a JSON number", id="NaN"),
        pytest.param(b"[-Infinity]", "-Infinity is not a JSON number", id="infinite"),
        pytest.param(b"1e999", "the number 1e999 is too large", id="too large"),
        pytest.param(rb'{"a": "\ud800"}', r"\\ud800 is half of a surrogate pair", id="half a pair"),
        pytest.param(rb'{"\uDFFF": 1}', r"\\udfff is half of a surrogate pair", id="half a pair in a key"),
        pytest.param(b'"\xed\xa0\x80"', "byte 1 is not valid UTF-8", id="half a pair in bytes"),
        pytest.param(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 100", id="deep"),
        pytest.param(b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than 100", id="deep objects"),
        pytest.param(b"[" * 60_000, "nested deeper than 100", id="very deep"),
        pytest.param(b"9" * 5000, "999... in column 1 has 5000 digits, the limit is 4300", id="long whole number"),
        pytest.param(
            b'["' + b"8" * 5000 + b'",\n -' + b"9" * 5000 + b"]", "999... in line 2, column 3", id="in a list"
        ),
        pytest.param(b"9" * 5000 + b".]", "an integer has more than 4300 digits", id="long and broken"),
        pytest.param(b"[1,, " + b"9" * 5000 + b"]", "Expecting value: .* column 4", id="broken before"),
        pytest.param(b"1e" + b"9" * 5000, "the number 1e999", id="long exponent"),
    ],
)
def test_faulty_texts(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(content)


def test_a_large_faulty_text_is_refused_at_once() -> None:
    names = b",".join(b'"%d": 1' % number for number in range(200_000))
    started = time.process_time()
    with pytest.raises(ValueError, match='"7" occurs twice'):
        parse(b"{" + names + b', "7": 1}', MEDIUM)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("read", [loads, parse])
@pytest.mark.parametrize("max_values", [SMALL, MEDIUM])
def test_only_so_many_values_are_read(read: Callable[..., Any], max_values: int) -> None:
    """A list with the most values is read. One more is refused, before Python makes any of them."""
    most = b"[" + b"0," * (max_values - 2) + b"0]"
    assert len(read(most, max_values)) == max_values - 1
    for hostile in (most[:-1] + b",0]", b"[" + b"[]," * max_values + b"0]", b"{" * (max_values + 1)):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"more than {max_values} values"):
                read(hostile, max_values)
            assert tracemalloc.get_traced_memory()[1] < 10_000
        finally:
            tracemalloc.stop()


def test_commas_and_brackets_inside_strings_do_not_count() -> None:
    text = r"a, b: \\( \frac{1}{2}, [3, \"4\"] \\)"
    rows = [{"prompt": text, "answer": [text]}] * 6000
    content = json.dumps(rows).encode()
    assert count_values(content) > SMALL > 7 * len(rows)
    assert loads(content) == parse(content) == rows


@pytest.mark.parametrize("content", [b'"' + b"," * 10**6, b'"' * 10**6 + b"," * SMALL, b'"\\' * 10**6 + b"," * SMALL])
def test_the_search_for_strings_is_linear(content: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ValueError):
        loads(content)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_only_utf_8_is_read(encoding: str) -> None:
    """In UTF-16, the second byte of U+0122 is a quotation mark: it would hide the values from the count."""
    with pytest.raises(ValueError):
        loads('["\u0122",[],[],"\u0122"]'.encode(encoding))
    assert loads("\ufeff[1]".encode()) == [1]


def test_a_value_nested_too_deeply_for_python_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        loads(b"[" * 60_000)


def test_the_defaults_are_those_of_descriptions() -> None:
    for read in (loads, parse):
        with pytest.raises(ValueError, match="65536"):
            read(b"[" + b"0," * SMALL + b"0]")
    assert parse(b"[" + b"0," * LARGE + b"0]", None) == [0] * (LARGE + 1)
