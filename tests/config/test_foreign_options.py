"""Every option of ColossalRL, ColossalChat and RL2, typed as a flag and as an override, is answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import typer.main

from megarl.cli import app
from megarl.config.reading.explaining import key_hint
from megarl.config.recipe import read
from megarl.config.schema import all_fields, section_of
from megarl.files.nearest import nearest
from megarl.types import ConfigError
from tests.config.foreign_options import BATCH, NONE, OPTIONS
from tests.config.refusals import faults
from tests.config.test_migration import NONE as WITHOUT
from tests.config.test_migration import WRITTEN
from tests.config.test_migration_table import ROWS

SPELLINGS = {
    name: [(text, fields) for row, fields in rows.items() for text in row.split()] for name, rows in OPTIONS.items()
}


def is_answered(answer: str, fields: tuple[str, ...]) -> bool:
    """Whether an answer names one of the fields, or why there is none."""
    without = re.search(r"has no counterpart: \w+", answer) is not None
    if fields is BATCH:
        return without or " it is " in answer
    if fields is NONE:
        return without
    return any(re.search(rf"(?<![\w.]){re.escape(field)}(?![\w.])", answer) for field in fields)


@pytest.fixture(scope="module")
def typed() -> Callable[..., str]:
    """The error of `megarl COMMAND recipe.yaml` with further arguments."""
    commands = typer.main.get_command(app)

    def run(*arguments: str, command: str = "train") -> str:
        with pytest.raises(ConfigError) as caught:
            commands.main([command, "recipe.yaml", *arguments], standalone_mode=False)
        return str(caught.value)

    return run


def test_the_lists_are_whole() -> None:
    assert [len(rows) for rows in SPELLINGS.values()] == [94, 60, 87]


@pytest.mark.parametrize("program", OPTIONS)
def test_an_option_typed_as_a_flag_is_answered(typed: Callable[..., str], program: str) -> None:
    answers = {option: typed(option, "8") for option, _ in SPELLINGS[program]}
    wrong = {
        option: answers[option]
        for option, fields in SPELLINGS[program]
        if not answers[option].startswith(f"{option}: unknown option; ") or not is_answered(answers[option], fields)
    }
    assert wrong == {}


@pytest.mark.parametrize("program", OPTIONS)
def test_an_option_typed_as_an_override_is_answered(small: Path, program: str) -> None:
    """Those that are a field here, as `lora.rank` of RL2, are accepted."""
    known = all_fields()
    keys = {option.lstrip("-").replace("-", "_"): fields for option, fields in SPELLINGS[program]}
    foreign = {key: fields for key, fields in keys.items() if key not in known or section_of(known[key]) is not None}
    lines = {line.partition(" = ")[0]: line for line in read(small, [f"{key}=8" for key in foreign]).problems}
    wrong = {key: lines.get(key) for key, fields in foreign.items() if not is_answered(lines.get(key, ""), fields)}
    assert wrong == {}


@pytest.mark.parametrize("form", ["key", "flag"])
def test_every_row_of_the_migration_table_is_answered(typed: Callable[..., str], form: str) -> None:
    """A name that other programs share may have another meaning there; it is never called unknown without an answer."""
    known, silent = all_fields(), {}
    for row in ROWS:
        name = row.spellings[0]
        key = name.lstrip("-").replace("-", "_")
        if key in known and section_of(known[key]) is None:
            continue
        answer = key_hint(key) if form == "key" else typed(name if name.startswith("-") else f"--{name}", "8")
        if not re.search(r"it is|no counterpart|it belongs under|; write |; is a section here", answer):
            silent[name] = answer
    assert silent == {}


@cache
def distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    fewest = distance(one[1:], other[1:]) + (one[0] != other[0])
    if one[:2] == other[1::-1] and len(one) > 1:
        fewest = min(fewest, distance(one[2:], other[2:]) + 1)
    return min(fewest, distance(one[1:], other) + 1, distance(one, other[1:]) + 1)


def test_a_suggestion_is_at_most_a_third_of_the_letters_away(small: Path) -> None:
    names = [*WRITTEN, *WITHOUT, *(row.spellings[0].lstrip("-") for row in ROWS)]
    names += ["tokenizer_file", "wandb_mode", "plugins", "ranking", "epoch_size", "seeds", "stepz", "xx", "lop", "mdl"]
    hints = {name: key_hint(f"{section}{name}") for name in names for section in ("", "train.", "qqq.")}
    near = {name: match[1] for name, hint in hints.items() if (match := re.search(r"did you mean ([\w.]+)", hint))}
    assert {"seeds", "stepz", "lop"} <= near.keys(), "there are some"
    for name, field in near.items():
        leaf = field.rpartition(".")[2]
        assert 3 * distance(name.rpartition(".")[2], leaf) <= len(name.rpartition(".")[2]), (name, field)


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("abc", ["abd", "xyz"], "abd"),
        ("ab", ["ac"], None),
        ("abc", ["acb"], "acb"),
        ("abc", ["bca"], None),
        ("abcdef", ["badcef"], "badcef"),
        ("Norm-By", ["norm_by"], "norm_by"),
        ("abcdef", ["abxyef", "abxyzf"], "abxyef"),
        ("abcdef", ["abxyzf"], None),
        ("abcdef", [], None),
    ],
)
def test_nearest(word: str, choices: list[str], expected: str | None) -> None:
    assert nearest(word, choices) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "5"], "--steps: unknown option; write train.steps=5"),
        (["--steps=5"], "write train.steps=5"),
        (["--train.steps", "5"], "write train.steps=5"),
        (["--steps"], "write train.steps=VALUE"),
        (["--dataset", "X"], "here it is data.train; write data.train=X"),
        (["-lr", "1e-6"], "optimizer.learning_rate=1e-6"),
        (["--tp", "2"], "write trainer.tp=2 or rollout.tp=2 or distillation.tp=2"),
        (["--stepz", "5"], "did you mean train.steps? Write it as SECTION.FIELD=5"),
        (["--qqqqqq", "train.steps=3"], "--qqqqqq: unknown option; no option or field is like it"),
        (["--algo", "GRPO", "--num-generations", "8"], "--num-generations: unknown option; here it is"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan", "show-config", "doctor"])
def test_an_unknown_option_is_answered(
    typed: Callable[..., str], arguments: list[str], words: str, command: str
) -> None:
    assert words in typed(*arguments, command=command)


def test_an_option_of_the_command_itself_may_be_misspelt(typed: Callable[..., str]) -> None:
    assert "did you mean --dry-run?" in typed("--dry-runn")
    assert typed("--dry-run", "--stepz", "5").startswith("--stepz: unknown option; did you mean train.steps?")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+train.steps=3", "a field is set without the +; write train.steps=3"),
        ("++train.steps=3", "write train.steps=3"),
        ("algorithm.preset=GRPO", "did you mean 'grpo'?"),
        ("algorithm.preset=REINFORCE_PPB", "did you mean 'reinforce_plus_plus_baseline'?"),
        ("algorithm.advantage=GAE", "did you mean 'gae'?"),
        ("algorithm.policy_loss=cliped", "did you mean 'clipped'?"),
        ("model.dtype=bf16", "did you mean 'bfloat16'?"),
        ("model.dtype=fp16", "did you mean 'bfloat16'?"),
        ("loop=dpo", "did you mean 'preference'?"),
        ("optimizer.schedule=cosin", "did you mean 'cosine'?"),
        ("rollout.placement=colocate", "did you mean 'colocated'?"),
        ("trainer.offload=[optimiser]", "did you mean 'optimizer'?"),
        ("logger=wandb", "here it is trackers (tensorboard, wandb, mlflow"),
        ("report_to=wandb", "here it is trackers"),
        ("reward.weights=[1,2]", "here it is reward.functions and reward.function_weight"),
    ],
)
def test_an_override_in_other_programs_words_is_answered(small: Path, override: str, words: str) -> None:
    assert words in "\n".join(faults(small, override))


def test_a_value_that_is_like_none_gets_no_suggestion(small: Path) -> None:
    [line] = faults(small, "algorithm.preset=something_else")
    assert "did you mean" not in line and "must be 'grpo'" in line
