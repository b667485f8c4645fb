from __future__ import annotations

import time

import pytest

from megarl.files.strict_json import MAX_DEPTH, parse


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"a": [1, 2.5, null, true], "b": {"c": "d"}}', {"a": [1, 2.5, None, True], "b": {"c": "d"}}),
        (b"\xef\xbb\xbf[]", []),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (rb'"\\ud800"', "\\ud800"),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b"[" + b"[]," * 500 + b"[]]", [[]] * 501),
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
        pytest.param(b"[" * 10**6, "nested deeper than 100", id="very deep"),
        pytest.param(b"9" * 5000, "4300 digits", id="long whole number"),
    ],
)
def test_faulty_texts(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(content)


def test_a_large_faulty_text_is_refused_at_once() -> None:
    names = b",".join(b'"%d": 1' % number for number in range(200_000))
    started = time.process_time()
    with pytest.raises(ValueError, match='"7" occurs twice'):
        parse(b"{" + names + b', "7": 1}')
    assert time.process_time() - started < 2
