"""Each row of launch/recipes/MIGRATION.md is a recipe, and agrees with what a recipe with that option is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.config.hints.foreign import OPTIONS, OTHERS
from megarl.config.hints.migration import Option, options, overrides_of
from megarl.config.reading.explaining import key_hint, option_hint
from megarl.config.recipe import load
from megarl.planner import sizes
from megarl.preflight.algorithm import learning, off_policy
from megarl.preflight.libraries.keyword_arguments import check_keywords
from megarl.preflight.rewards import check_reward_fields
from megarl.types import ConfigError
from tests.rollout.batches import attempt, batch_of

TABLE = Path(__file__).resolve().parents[2] / "launch/recipes/MIGRATION.md"

BASE = """
name: base
loop: rl
model: {path: m}
data: {train: t.jsonl}
trainer: {max_tokens_per_microbatch: 65536}
train: {prompts_per_step: 64}
rollout: {sampling: {max_new_tokens: 1024}}
"""


ROWS = [option for option in options() if option.program != OTHERS]
PROGRAMS = [program for program in OPTIONS if program != OTHERS]


def test_the_table_is_read_in_full() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) > 200
    assert len(PROGRAMS) == 9


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Recipe]:
    path = tmp_path_factory.mktemp("migration") / "base.yaml"
    path.write_text(BASE)
    return lambda overrides: load(path, overrides)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_row_is_a_recipe(recipe: Callable[[list[str]], Recipe], program: str) -> None:
    """Fields exist, have these values' types and an effect, and go together; models and data are not looked at."""
    wrong: dict[str, object] = {}
    for row in (row for row in ROWS if row.program == program):
        if not row.fields:
            assert row.note, f"{row.text} has no field and no reason"
            continue
        try:
            made = recipe(overrides_of(row))
        except Exception as error:
            wrong[row.text] = str(error)
            continue
        parallel = sizes.parallel_of(made)
        faults = [
            *sizes.find_rank_faults(made),
            *sizes.find_batch_faults(made, parallel.dp),
            *sizes.find_length_faults(made),
        ]
        faults += [*learning.check_optimizers(made), *learning.check_algorithm(made), *off_policy.check_sampling(made)]
        faults += [
            *off_policy.check_stragglers(made),
            *off_policy.check_staleness(made),
            *check_reward_fields(made),
            *check_keywords(made),
        ]
        if faults:
            wrong[row.text] = faults
    assert wrong == {}


def messages(row: Option) -> dict[str, str]:
    """The messages for a row's option, by what was typed: each spelling, as a flag and as a key."""
    value, typed = row.value or None, {}
    for spelling in row.spellings:
        plain = spelling.lstrip("-")
        if spelling.startswith("-") and not spelling.startswith("--"):
            typed[spelling] = option_hint(spelling, value, [])
            continue
        for name in {plain, plain.replace("-", "_"), plain.replace("_", "-")}:
            typed[f"--{name}"] = option_hint(f"--{name}", value, [])
        typed[plain] = key_hint(plain.replace("-", "_"), value)
    return typed


STATEMENT = re.compile(
    r"(?:^|; )(here|elsewhere|in [\w-]+(?:, [\w-]+)*(?: and [\w-]+)?) it is ([^(;]+?)(?=, write | \(|;|$)"
)
ABSENCE = re.compile(r"(?:^|; )(?:(elsewhere|in [\w-]+(?:, [\w-]+)*(?: and [\w-]+)?) it )?has no counterpart: ")


def stated_fields(message: str, program: str) -> list[set[str]]:
    """Return the fields that each statement of a message names for a program's option; none for "no counterpart"."""
    statements = [
        (where, set(re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9A-Z]+)*(?=[= ,]|$)", re.sub(r"=\S+", "=", fields))) - {"and"})
        for where, fields in STATEMENT.findall(message)
    ]
    statements += [(match[1] or "here", set()) for match in ABSENCE.finditer(message)]
    about = [fields for where, fields in statements if re.search(rf"(?<![\w-]){re.escape(program)}(?![\w-])", where)]
    return about or [fields for where, fields in statements if where in ("here", "elsewhere")]


def test_no_message_contradicts_the_table() -> None:
    """Each spelling of each option, as a flag and as a key: the message has the fields of the row for its program."""
    wrong, own_names = {}, 0
    for row in options():
        fields = set(row.fields) if not row.value else {item.partition("=")[0] for item in row.assignments}
        for typed, message in messages(row).items():
            stated = stated_fields(message, row.program or "elsewhere")
            if stated:
                if fields not in stated:
                    wrong[f"{row.program} {typed}"] = (fields, message)
                continue
            # A key with the name of a field elsewhere in a recipe.
            own_names += 1
            if row.fields[0] not in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
                wrong[f"{row.program} {typed}"] = (fields, message)
    assert wrong == {}
    assert own_names < 70


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--num_episodes", "2", ["write train.epochs=2", "in ColossalChat it is train.steps"]),
        ("-a", "GRPO", ["algorithm.preset=grpo algorithm.kl_coefficient=0.01 algorithm.aggregation=sample_level"]),
        ("--algo", "grpo", ["algorithm.preset=grpo algorithm.kl_coefficient=0.01"]),
        ("--train_batch_size", "8", ["train.prompts_per_step", "in ColossalChat it is trainer.max_tokens_per_microb"]),
        ("--max_length", "2048", ["trainer.max_tokens_per_microbatch", "in ColossalChat it is data.max_prompt_tokens"]),
        ("--mixed_precision", "bf16", ["write model.dtype=bfloat16"]),
        ("--mixed_precision", "fp16", ["model.dtype=bfloat16", "no fp16"]),
        ("--dtype", "half", ["write model.dtype=bfloat16"]),
        ("--gradient_checkpointing", "true", ["write trainer.recompute=VALUE"]),
        ("--beta", "0.5", ["algorithm.kl_coefficient", "in TRL it is", "distillation.jsd_beta"]),
    ],
)
def test_a_message_has_the_meanings_of_all_programs(option: str, value: str, words: list[str]) -> None:
    message = option_hint(option, value, [])
    assert all(word in message for word in words), message


@pytest.mark.parametrize("value", ["true", "bf16"])
def test_no_message_advises_a_value_that_is_refused(recipe: Callable[[list[str]], Recipe], value: str) -> None:
    hints = [option_hint(f"--{option.names[0]}", value, []) for option in options() if option.names]
    advised = [match[1] for hint in hints if (match := re.search(r"write ([a-z_.]+=[^;( ]+)", hint))]
    overrides = {override.partition("=")[0]: override for override in advised if not override.endswith("=VALUE")}
    assert overrides
    with pytest.raises(ConfigError) as caught:
        recipe([*overrides.values(), "train.steps=no_number"])
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    # A field of another loop is refused too, whatever its value.
    refused = [line.partition(":")[0] for line in lines if "does nothing" not in line]
    wrong = {
        field: lines for field in overrides if (lines := [line for line in refused if line.startswith(f"{field} ")])
    }
    # The value that is wrong on purpose shows that values are looked at.
    assert wrong.keys() <= {"train.steps"} and any(line.startswith("train.steps") for line in refused)


def test_a_row_tells_of_its_own_program() -> None:
    programs = {"OpenRLHF", *PROGRAMS}
    strange = {
        f"{row.program} {row.text}": row.note
        for row in options()
        if any(re.search(rf"\b{re.escape(program)}\b", row.note) for program in programs - {row.program})
    }
    assert strange == {}


def formulas(program: str) -> dict[str, str]:
    """The formulas of a program's batch sizes, by field, as the table has them."""
    text = TABLE.read_text(encoding="utf-8")
    [section] = [part for part in text.split("\n## ")[1:] if part.partition(":")[0] == program]
    return dict(re.findall(r"^([a-z_]+\.[a-z_]+) = (.+)$", section, re.MULTILINE))


def translated(recipe: Callable[[list[str]], Recipe], program: str, given: dict[str, int], *more: str) -> Recipe:
    """The recipe that the formulas make of another program's options; every value is a whole number."""
    values = {field: eval(formula, {}, dict(given)) for field, formula in formulas(program).items()}
    assert all(value == int(value) for value in values.values()), values
    return recipe([*(f"{field}={int(value)}" for field, value in values.items()), *more])


def update_sizes(made: Recipe) -> list[int]:
    """Completions of each optimizer update in one step of a recipe, over all ranks, by the code of a run."""
    train = made.train
    problems = [
        [attempt(prompt, 1.0, 1) for _ in range(train.samples_per_prompt)] for prompt in range(train.prompts_per_step)
    ]
    batch = batch_of([trajectory for group in problems for trajectory in group], made)
    assert not [*sizes.find_batch_faults(made, sizes.parallel_of(made).dp)]
    return [len(part.cu_seqlens) - 1 for part in batch.minibatches(made, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"num_inferencer": 4, "num_trainers": 4, "tp": 2, "tbs": 64}, id="tensor parallel"),
        pytest.param({"ibs": 8, "num_inferencer": 1, "tbs": 4, "tMbs": 1, "ptp": 2}, id="one update"),
        pytest.param({"ibs": 16, "tbs": 2, "tMbs": 2, "num_trainers": 4, "pp": 2, "imbs": 4}, id="eight updates"),
    ],
)
def test_the_batch_sizes_of_colossalrl_are_kept(recipe: Callable[[list[str]], Recipe], changes: dict[str, int]) -> None:
    """Against its own rules: a step is what all inferencers sample; tbs prompts a data-parallel rank are an update."""
    there = {
        "ibs": 64, "imbs": 8, "tbs": 32, "tMbs": 8, "tmbs": 2, "num_generations": 8, "num_inferencer": 2,
        "num_trainers": 2, "tp": 1, "pp": 1, "ptp": 1, "mpt": 512, "mnt": 1024, **changes,
    }  # fmt: skip
    there["dp"] = there["num_trainers"] // (there["tp"] * there["pp"])
    collected = [there["ibs"]] * there["num_inferencer"]
    updates, waiting = [], 0
    for prompts in collected:
        # Every rank takes mini-batches of tMbs prompts of its share; tbs of them make an update.
        waiting += prompts
        while waiting >= there["tbs"] * there["dp"]:
            updates.append(there["tbs"] * there["dp"] * there["num_generations"])
            waiting -= there["tbs"] * there["dp"]
    assert waiting == 0
    overrides = [f"trainer.tp={there['tp']}", f"trainer.pp={there['pp']}", f"rollout.tp={there['ptp']}"]
    made = translated(recipe, "ColossalRL", there, "rollout.placement=separate", *overrides)
    assert update_sizes(made) == updates
    parallel = sizes.parallel_of(made)
    assert (parallel.dp, parallel.rollout_ranks) == (there["dp"], there["num_inferencer"] * there["ptp"])
    assert len(parallel.leaders()) == there["num_inferencer"]


def test_the_batch_sizes_of_colossalchat_are_kept(recipe: Callable[[list[str]], Recipe]) -> None:
    """Each process collects num_collect_steps batches; a pass over them is cut into batches, several an update."""
    there = {
        "num_collect_steps": 2, "experience_batch_size": 16, "train_batch_size": 8, "accumulation_steps": 2,
        "num_update_steps": 5, "max_length": 2048, "dp": 2,
    }  # fmt: skip
    passes = there["num_collect_steps"] * there["experience_batch_size"] // there["train_batch_size"]
    of_update = there["train_batch_size"] * there["accumulation_steps"] * there["dp"]
    updates = [of_update] * (passes // there["accumulation_steps"] * there["num_update_steps"])
    made = translated(recipe, "ColossalChat", there, "algorithm.preset=ppo", "cluster.ranks_per_node=2")
    assert update_sizes(made) == updates == [32] * 10
