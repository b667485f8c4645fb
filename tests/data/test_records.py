import json

import pytest

from megarl.data.reader import read_records
from megarl.types import DataError

USER = {"role": "user", "content": "2 + 3?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def only_record(tmp_path, fields):
    (record,) = read_records(write(tmp_path / "data.jsonl", fields))
    return record


def test_records_come_in_order_with_their_lines(tmp_path):
    path = write(tmp_path / "data.jsonl", {"n": 2}, "", {"n": 3}, "   ", {"n": 5})
    assert [(record.line, record.fields["n"]) for record in read_records(path)] == [(1, 2), (3, 3), (5, 5)]


@pytest.mark.parametrize("messages", [USER, [USER]], ids=["ColossalRL's single message", "list"])
def test_one_message_or_a_list(tmp_path, messages):
    record = only_record(tmp_path, {"messages": messages, "gt_answer": "5"})
    assert record.messages() == (USER,)
    assert record.prompt("Be brief.") == (SYSTEM, USER)
    assert record.answer() == "5"


def test_a_record_keeps_its_own_system_message(tmp_path):
    own = {"role": "system", "content": "Be long."}
    assert only_record(tmp_path, {"messages": [own, USER]}).prompt("Be brief.") == (own, USER)


@pytest.mark.parametrize(
    ("answer", "text"), [("05", "05"), (5, "5"), (0, "0"), (2.5, "2.5"), (["5", 6], ["5", 6]), ({"x": 1}, {"x": 1})]
)
def test_answers_are_text_or_numbers_or_structured(tmp_path, answer, text):
    assert only_record(tmp_path, {"gt_answer": answer}).answer() == text


@pytest.mark.parametrize("number", ["3.14159265358979323846", "12345678901234567.5", "[1, 0.12345678901234567890]"])
def test_an_answer_is_never_rounded(tmp_path, number):
    (record,) = read_records(write(tmp_path / "data.jsonl", f'{{"messages": [], "gt_answer": {number}}}'))
    with pytest.raises(DataError, match="'gt_answer' has a number with more digits than a float keeps"):
        record.answer()


@pytest.mark.parametrize("number", ["0.30000000000000004", "1.2345678901234568e+16", "2.50000000000000000000"])
def test_a_number_that_a_float_keeps_is_an_answer(tmp_path, number):
    (record,) = read_records(write(tmp_path / "data.jsonl", f'{{"messages": [], "gt_answer": {number}}}'))
    assert record.answer() == str(float(number))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"answer": "5"}, "line 1: no field for answer; the record has 'answer'.", id="missing"),
        pytest.param({}, "no field for answer; the record has none at all", id="no fields"),
        pytest.param({"gt_answer": None}, "line 1: 'gt_answer' is null", id="null"),
        pytest.param({"gt_answer": True}, "'gt_answer' is true", id="boolean"),
        pytest.param({"gt_answer": []}, r"'gt_answer' is \[\]; give the answer", id="empty list"),
        pytest.param({"gt_answer": " "}, "'gt_answer' is empty", id="empty"),
    ],
)
def test_faulty_answers(tmp_path, fields, message):
    with pytest.raises(DataError, match=message):
        only_record(tmp_path, fields).answer()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        pytest.param(None, "'messages' is missing", id="missing"),
        pytest.param([], r"'messages' is \[\]", id="no messages"),
        pytest.param("2 + 3?", "'messages' is \"2", id="text"),
        pytest.param(["2 + 3?"], r"messages\[0\] is \"2", id="text in a list"),
        pytest.param([USER, {"role": "bot", "content": "5"}], r"messages\[1\] has role \"bot\"; use one of", id="role"),
        pytest.param([{"content": "5"}], r"messages\[0\] has role null", id="no role"),
        pytest.param([{"role": "user"}], r"messages\[0\] has content null", id="no content"),
        pytest.param([{"role": "user", "content": [1]}], r"messages\[0\] has content \[1\]", id="content of parts"),
        pytest.param({"role": "user", "content": " \n"}, r"messages\[0\] is a user's message without text", id="blank"),
        pytest.param([USER, SYSTEM], r"messages\[1\] is a system message", id="late system message"),
    ],
)
def test_faulty_messages(tmp_path, messages, message):
    record = only_record(tmp_path, {} if messages is None else {"messages": messages})
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: " + message):
        record.messages()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param(['{"a": 1}', '{"a": '], "line 2: not JSON", id="cut line"),
        pytest.param(['{"a": 1}', "", "[1]"], r"line 3: \[1\] is not a JSON object", id="list"),
        pytest.param(['{"a": 1}', '{"a": 1, "a": 2}'], 'line 2: not JSON \\(the key "a" occurs twice', id="key twice"),
        pytest.param(
            ['{"a": 1}', '{"gt_answer": [-' + "9" * 5000 + "]}"],
            "line 2: not JSON .* has 5000 digits",
            id="long integer",
        ),
        pytest.param(['{"gt_answer": NaN}'], "line 1: not JSON \\(NaN is not a JSON number", id="NaN"),
        pytest.param([r'{"gt_answer": "\ud800"}'], "line 1: not JSON .*surrogate", id="surrogate"),
        pytest.param(['{"a": ' + "[" * 5000 + "]" * 5000 + "}"], "line 1: not JSON .*nested deeper", id="deep"),
        pytest.param([], "holds no record", id="empty file"),
        pytest.param(["", "  "], "holds no record", id="blank lines only"),
    ],
)
def test_faulty_files(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as raised:
        list(read_records(write(tmp_path / "data.jsonl", *lines)))
    assert raised.value.exit_code == 65


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        list(read_records(tmp_path / "data.jsonl"))


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_record_of_many_fields_is_told_by_a_few(tmp_path):
    record = only_record(tmp_path, {f"field{number}" * 20: 0 for number in range(1000)})
    with pytest.raises(DataError, match="980 more") as raised:
        record.answer()
    assert len(str(raised.value)) < 3000
