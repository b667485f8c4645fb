"""Tests of programs in the formats of data sets, and how outputs are compared."""

import base64
import json
import pickle
import time
import zlib

import pytest

from megarl.rewards.functions.code_cases import Case, read_cases
from megarl.rewards.functions.code_programs import Trial, last_block, same_output, same_value


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


COLUMNS = {"inputs": ["2\n3\n", ["5", "7"]], "outputs": ["5\n", 12]}
STDIN = (Case("5\n", "2\n3\n"), Case("12", "5\n7"))
CALLS = (Case([0, 1], function="two_sum", arguments=([2, 7], 9)), Case("ab", function="two_sum", arguments=("a", "b")))


@pytest.mark.parametrize(
    ("answer", "record", "found"),
    [
        pytest.param(COLUMNS, {}, STDIN, id="PRIME, stdin"),
        pytest.param(json.dumps(COLUMNS), {}, STDIN, id="PRIME as JSON"),
        pytest.param("", {"test_cases": COLUMNS}, STDIN, id="ColossalRL"),
        pytest.param("42", {"test_cases": json.dumps(COLUMNS)}, STDIN, id="ColossalRL as JSON"),
        pytest.param(
            {"inputs": [[[2, 7], 9], '"a"\n"b"'], "outputs": [[0, 1], "ab"], "fn_name": "two_sum"},
            {},
            CALLS,
            id="PRIME, calls",
        ),
        pytest.param(
            "",
            {
                "public_test_cases": json.dumps([{"input": "2\n3\n", "output": "5\n", "testtype": "stdin"}]),
                "private_test_cases": packed([{"input": "5\n7", "output": "12", "testtype": "stdin"}]),
                "metadata": "{}",
            },
            STDIN,
            id="LiveCodeBench, stdin",
        ),
        pytest.param(
            "",
            {
                "public_test_cases": json.dumps([{"input": "[2, 7]\n9", "output": "[0, 1]", "testtype": "functional"}]),
                "private_test_cases": json.dumps([{"input": '"a"\n"b"', "output": '"ab"', "testtype": "functional"}]),
                "metadata": json.dumps({"func_name": "two_sum"}),
            },
            CALLS,
            id="LiveCodeBench, calls",
        ),
        pytest.param(
            [
                {
                    "input": "[2, 7]\n9",
                    "output": "[0, 1]",
                    "testtype": "functional",
                    "metadata": {"func_name": "two_sum"},
                }
            ],
            {},
            CALLS[:1],
            id="a list with names",
        ),
        pytest.param(
            [
                {"type": "function_call", "fn_name": "two_sum", "input": [[2, 7], 9], "output": [0, 1]},
                {"type": "stdin_stdout", "fn_name": None, "input": "2\n3\n", "output": "5\n"},
            ],
            {},
            (CALLS[0], STDIN[0]),
            id="Prime Intellect",
        ),
        pytest.param([{"fn_name": "two_sum", "input": '"a"\n"b"', "output": "ab"}], {}, CALLS[1:], id="fn_name alone"),
    ],
)
def test_formats(answer, record, found):
    assert read_cases(answer, record) == found


def test_tests_in_two_places_are_refused():
    record = {"test_cases": COLUMNS, "public_test_cases": [{"input": "1", "output": "1"}]}
    with pytest.raises(ValueError, match=r"kwargs\.field"):
        read_cases("", record)
    assert read_cases("", record, "test_cases") == STDIN


def test_a_field_may_be_named():
    assert read_cases("", {"mine": COLUMNS, "test_cases": "broken"}, "mine") == STDIN


class Command:
    def __reduce__(self):
        import os

        return os.mkdir, ("/tmp/megarl-unpickled",)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param("42", "inputs", id="an answer that is no test"),
        pytest.param({"inputs": ["1"], "outputs": []}, "equal length", id="lengths"),
        pytest.param({"inputs": [], "outputs": []}, "is empty", id="none"),
        pytest.param([{"input": "1"}], "a test in the record", id="without output"),
        pytest.param([{"input": "1", "output": "1", "testtype": "functional"}], "func_name", id="without a name"),
        pytest.param([{"input": "1", "output": "1", "testtype": "interactive"}], "testtype is", id="unknown testtype"),
        pytest.param([{"input": "1", "output": "1", "type": "checker"}], "type is", id="unknown type"),
        pytest.param([{"input": "1", "output": "1", "type": ["stdin"]}], "type is", id="a list as type"),
        pytest.param([{"input": "1", "output": "1", "weight": 2}], "'weight' that is not read", id="key of a row"),
        pytest.param(COLUMNS | {"assert_case": ["f()"]}, "'assert_case' that is not read", id="key of columns"),
        pytest.param([{"input": "1", "output": None}], "output is None", id="null"),
        pytest.param({"inputs": [{"n": 1}], "outputs": ["1"]}, "input or output is", id="object as input"),
        pytest.param(
            base64.b64encode(zlib.compress(pickle.dumps(Command()))).decode(), "not JSON", id="a pickle that runs"
        ),
    ],
)
def test_what_is_no_test_is_refused(answer, error):
    with pytest.raises(ValueError, match=error):
        read_cases(answer, {})


@pytest.mark.parametrize(
    ("answer", "record"),
    [
        pytest.param('{"inputs": ["1"], "outputs": ["1"], "outputs": ["2"]}', {}, id="columns"),
        pytest.param([{"input": '{"a": 1, "a": 2}', "output": "1"}], {"metadata": {"func_name": "f"}}, id="arguments"),
        pytest.param([{"input": "1", "output": '{"a": 1, "a": 2}'}], {"metadata": {"func_name": "f"}}, id="result"),
        pytest.param([{"input": "1", "output": "1"}], {"metadata": '{"func_name": "f", "func_name": "g"}'}, id="name"),
    ],
)
def test_tests_with_a_key_twice_are_refused(answer, record):
    with pytest.raises(ValueError, match="occurs twice"):
        read_cases(answer, record)


def test_a_bomb_is_not_unpacked(monkeypatch):
    monkeypatch.setattr("megarl.rewards.functions.code_cases.MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="not JSON"):
        read_cases(base64.b64encode(zlib.compress(bytes(2 << 20))).decode(), {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```\nfirst\n```\nthen\n```py\nsecond\n```", "second\n"),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\n```python\ny", None),
        ("~~~\ny\n~~~", "y\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("x = 1", None),
        ("``` python  \nx\n```  ", "x\n"),
        ("```python\n```", ""),
        ("```python\nx\n```\nOutput:\n```\n4\n```", "x\n"),
        ("```python3\nx\n```\n```text\n4\n```\n```bash\nls\n```", "x\n"),
        ("```\nx\n```\n```text\n4\n```", "4\n"),
        ("```Python\nx\n```\n```python\ny\n```", "y\n"),
        ("```{.python}\nx\n```\n```\n4\n```", "x\n"),
        ("```pycon\n>>> 4\n```\n```cpp\nx\n```", "x\n"),
        ("1. Run:\n   ```python\n   if x:\n       y\n\n   z\n   ```", "if x:\n    y\n\nz\n"),
        ("```python\n  x\n```", "  x\n"),
        ("   ```python\n x\n   ```", "x\n"),
        ("```python\nx\n```\nOutput:\n```\n4", None),
    ],
)
def test_the_last_block(text, found):
    assert last_block(text) == found


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("5", "5\n", True),
        ("5  \n6\n\n", "5\n6", True),
        ("1 2", "1  2", True),
        ("1\n2", "1 2", False),
        ("2 1", "1 2", False),
        ("0.3333333", "0.3333334", True),
        ("0.34", "0.33", False),
        ("10000001", "10000002", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("nan", "0.5", False),
        ("inf", "1.0", False),
        ("Yes", "YES", False),
        ("", "5", False),
        ("5\n5", "5", False),
        ("\n  5\r\n6", "5\n6", True),
        ("5\n\n6", "5\n6", False),
        ("a\u2028b", "a\nb", False),
        ("a\u2028b", "a b", True),
        ("1" * 400, "1.5", False),
        ("1_0.0", "10.0", False),
        ("1e400", "1e500", False),
        ("1e400", "1e400", True),
        ("\uff11\uff10.0", "10.0", False),
        ("True", "1.0", False),
        ("infinity", "1e999", False),
        ("10", "1e1", True),
        (".5", "0.5", True),
        ("+0.50", "0.5", True),
        ("0x1p1", "2.0", False),
        ("nan", "nan", True),
    ],
)
def test_outputs(printed, expected, is_same):
    assert same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ([0, 1], [0, 1], True),
        ([0, 1], [[0, 1]], True),
        (5, [5], True),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (True, 1, False),
        ("5", 5, False),
        ({"a": [1.0]}, {"a": [1]}, True),
        (None, None, True),
        ([1], [1, 2], False),
        (10**400, 0.5, False),
        (0.5, 10**400, False),
        ([10**400], [[10.0]], False),
        (True, 1.0, False),
        (1.0, True, False),
        ([False], [0.0], False),
        (float("inf"), 1.0, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_values(found, expected, is_same):
    assert same_value(found, expected) is is_same


@pytest.mark.parametrize("expected", ["5", "5.0", "true", "null"])
def test_a_text_that_looks_like_a_value_may_be_either(expected):
    [case] = read_cases({"inputs": [[1]], "outputs": [expected], "fn_name": "f"}, {})
    assert (case.expected, case.text) == (json.loads(expected), expected)
    trial = Trial("", case, has_numpy=False)
    mark = json.loads(trial.stdin)["mark"]
    accepted = [trial.passes(mark + json.dumps(value)) for value in (expected, json.loads(expected), "x", [expected])]
    assert accepted == [True, True, False, False]


def test_a_number_beyond_all_floats_does_not_equal_another() -> None:
    [case] = read_cases({"inputs": [[1]], "outputs": ["1e500"], "fn_name": "f"}, {})
    trial = Trial("", case, has_numpy=False)
    mark = json.loads(trial.stdin)["mark"]
    assert not trial.passes(mark + json.dumps(float("inf")))
    assert trial.passes(mark + json.dumps("1e500"))


def test_blanks_before_a_fence_take_no_time():
    before = time.process_time()
    assert last_block("```" + (" " * 40_000) + "`") is None
    assert time.process_time() - before < 2.0
