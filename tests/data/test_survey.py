"""`megarl data check`: every fault with its line, duplicates, overlap with held-out data, lengths, the first record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.data.chat import load_tokenizer
from megarl.data.survey import survey
from megarl.types import DataError


def problem(number: int, **changes: Any) -> dict[str, Any]:
    return {"messages": {"role": "user", "content": f"{number} + 1"}, "gt_answer": str(number + 1)} | changes


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(
        tmp_path / "train.jsonl", problem(1), "{broken", problem(2), problem(3, gt_answer=None), "[7]", problem(1),
        problem(5), {"gt_answer": "8"}, problem(2, gt_answer="4"),
    )  # fmt: skip


def test_all_faults_are_told_with_their_lines(source: str) -> None:
    found = survey(source)
    assert (found.kind, found.num_records, found.num_faults, found.is_sound) == ("problems", 5, 4, False)
    assert [fault.place.partition(", ")[2] for fault in found.faults] == ["line 2", "line 4", "line 5", "line 8"]
    assert (found.num_duplicates, found.duplicates) == (1, ["line 6 (as line 1)"])  # line 9 has another answer
    with pytest.raises(DataError, match="no such file"):
        survey("absent.jsonl")


def test_equal_faults_are_one_with_a_count(tmp_path: Path) -> None:
    lines = [problem(1), *[{"frage": "1", "antwort": "2"}] * 8, problem(2, gt_answer=None)]
    found = survey(write(tmp_path / "a.jsonl", *lines))
    assert (found.num_faults, found.num_different_faults) == (9, 2)
    first, second = map(str, found.faults)
    assert first.startswith(f"{tmp_path}/a.jsonl, line 2: no field for prompt and answer;")
    assert first.endswith("(and 7 more: line 3, line 4, line 5, line 6, line 7, ...)")
    assert second == f"{tmp_path}/a.jsonl, line 10: 'gt_answer' is null; give the answer as a string"


def test_the_command_takes_fields_or_a_recipe(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path / "a.jsonl", *({"frage": f"{n} + 1", "antwort": str(n + 1)} for n in range(3)))
    heldout = write(tmp_path / "b.jsonl", {"q": "2 + 1", "a": "3"})

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "check", *arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out + printed.err

    assert run(train, "--fields", "{prompt: frage, answer: antwort}")[0] == 0
    code, printed = run(train, "--kind", "problems")
    assert code == 65 and "name yours: --fields '{prompt: frage, answer: antwort}'" in printed
    code, printed = run(train, "--fields", "{frage: prompt}")
    assert code == 2 and "--fields frage: known are prompt, answer," in printed
    data = {
        "train": train, "fields": {"prompt": "frage", "answer": "antwort"},
        "validation": {"b": {"path": heldout, "fields": {"prompt": "q", "answer": "a"}}, "c": heldout},
    }  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"name": "r", "loop": "rl", "model": {"path": str(tiny_model())}, "data": data}))
    code, printed = run("--recipe", str(recipe))
    assert code == 65 and "data.train:\n" in printed and f"prompts also in {heldout}: " in printed
    assert f"data.validation.b:\n{heldout}: 1 problems, colossalrl; 0 more have errors" in printed
    assert f"data.validation.c:\n{heldout}: 0 problems, colossalrl; 1 more have errors" in printed
    assert run(train, "--recipe", str(recipe))[0] == 0
    code, printed = run("--recipe", str(recipe), "--kind", "pairs")
    assert code == 2 and printed.startswith("error: --kind")


def test_overlap_with_other_sources_is_that_of_prompts(source: str, tmp_path: Path) -> None:
    heldout = write(tmp_path / "heldout.jsonl", problem(9), problem(2, gt_answer="x"), "{broken")
    other = write(tmp_path / "other.jsonl", problem(10))
    found = survey(source, other_sources={heldout: None, other: None})
    assert found.num_overlaps == {heldout: 2, other: 0}
    assert found.overlaps == [f"line 3 ({heldout}, line 2)", f"line 9 ({heldout}, line 2)"]


@pytest.mark.parametrize(
    ("record", "kind", "trained"),
    [
        pytest.param(problem(1), "problems", [], id="problems"),
        pytest.param({"prompt": "1 + 1", "response": "2"}, "conversations", ["2<|im_end|>"], id="conversations"),
        pytest.param({"prompt": "1", "chosen": "2", "rejected": "3"}, "pairs", ["2<|im_end|>"], id="pairs"),
        pytest.param({"prompt": "1", "completion": "2", "label": True}, "judged", ["2<|im_end|>"], id="judged"),
    ],
)
def test_the_first_record_shows_what_is_trained(
    tiny_model: Callable[..., Path], tmp_path: Path, record: dict[str, Any], kind: str, trained: list[str]
) -> None:
    tokenizer = load_tokenizer(tiny_model())
    # Judged answers need both labels.
    further = [record | {"prompt": "3", "label": False}] if "label" in record else []
    found = survey(write(tmp_path / "a.jsonl", record, record, *further), tokenizer=tokenizer)
    assert (found.kind, found.is_sound, found.num_duplicates) == (kind, True, 1)
    assert [text for text, is_trained in found.first if is_trained] == trained
    assert "".join(text for text, _ in found.first).startswith("<|im_start|>user\n1")
    assert len(found.lengths) == 2 + len(further) and found.lengths[0] > 5


def test_the_command(
    source: str, tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", source, "--model", str(tiny_model())])
    assert ended.value.code == 65
    printed = capsys.readouterr().out
    assert f"{source}: 5 problems, colossalrl; 4 more have errors" in printed
    assert "duplicates: 1 line 6 (as line 1)" in printed and "tokens of a record: " in printed
    lines = [line for line in printed.splitlines() if line.endswith("#")]
    assert sum(int(line.split()[-2]) for line in lines) == 5
    talk = write(tmp_path / "talk.jsonl", {"prompt": "1 + 1", "response": "2"})
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", talk, "--model", str(tiny_model()), "--heldout", source])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "[[2<|im_end|>]]" in printed and f"prompts also in {source}: 1" in printed
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", talk, "--format", "verll"])
    assert ended.value.code == 2 and "known are colossalrl, rl2" in capsys.readouterr().err


def test_two_options_for_the_gold_answer_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "problems.jsonl", {"q": "1 + 1", "y": "2"})
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "check", source, "--fields", "{prompt: q, answer: y}", "--answer-field", "z"])
    assert ended.value.code == 2
    page = capsys.readouterr().err
    assert "--fields and --answer-field: " in page and "{" not in page


USER, SAID = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
OTHER = {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    ("kind", "record", "words"),
    [
        pytest.param("problems", {"messages": [USER, SAID], "gt_answer": "4"}, "last message has role", id="answered"),
        pytest.param("problems", problem(1, tools="[{"), "'tools' is .*not valid JSON", id="tools of a problem"),
        pytest.param("conversations", {"messages": [USER]}, "no message has the role assistant", id="no answer"),
        pytest.param(
            "conversations", {"messages": [USER, {**SAID, "weight": 0}]}, "have weight 0", id="nothing is trained"
        ),
        pytest.param("conversations", {"messages": [USER, SAID], "tools": "add"}, "'tools' is", id="tools"),
        pytest.param("pairs", {"messages": [USER], "chosen": "4", "rejected": "4"}, "are the same", id="equal answers"),
        pytest.param("pairs", {"chosen": [SAID], "rejected": [OTHER]}, "no field for prompt", id="no prompt"),
        pytest.param("judged", {"messages": [USER], "response": "4", "label": "yes"}, "give true for", id="label"),
        pytest.param(
            "judged", {"messages": [USER], "response": "4", "label": True}, "labels are the same", id="labels"
        ),
    ],
)
def test_a_survey_without_a_model_refuses_what_a_start_refuses(
    tmp_path: Path, tiny_model: Callable[..., Path], kind: Any, record: dict[str, Any], words: str
) -> None:
    path = write(tmp_path / "a.jsonl", record)
    bare, tokenised = (
        survey(path, kind=kind, tokenizer=tokenizer) for tokenizer in (None, load_tokenizer(tiny_model()))
    )
    assert not bare.is_sound and [str(fault) for fault in bare.faults] == [str(fault) for fault in tokenised.faults]
    assert re.search(words, str(bare.faults[0]))


@pytest.mark.parametrize("kind", ["problems", "conversations"])
def test_a_record_of_megabytes_is_found_within_seconds(
    tmp_path: Path, tiny_model: Callable[..., Path], kind: Any
) -> None:
    text = "word " * 1_000_000
    record = {"messages": [{"role": "user", "content": text}], "gt_answer": "4"}
    if kind == "conversations":
        record = {"messages": [{"role": "user", "content": text}, SAID]}
    path, tokenizer = write(tmp_path / "a.jsonl", record), load_tokenizer(tiny_model())
    found = survey(path, kind=kind, tokenizer=tokenizer, max_tokens=100)
    assert (found.num_records, found.num_faults, found.num_long) == (0, 1, 0)
    assert "allows 100" in str(found.faults[0])
    found = survey(path, kind=kind, tokenizer=tokenizer, max_tokens=100, drops_long=True)
    assert (found.num_records, found.num_faults, found.num_long) == (0, 0, 1)
