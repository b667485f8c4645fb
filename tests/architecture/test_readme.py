"""README and guides against the code: length, language, links, names, and every code block."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import yaml
from typer.main import get_command

import megarl
from megarl.cli import app
from megarl.config import AlgorithmConfig, ClusterConfig, Recipe
from megarl.config.recipe import load
from megarl.config.sections.health import RuleName
from megarl.environments import ENVIRONMENTS, Turn
from megarl.families.registry import FAMILIES
from megarl.files.import_path import import_object
from megarl.preflight.libraries.keyword_arguments import check_keywords
from megarl.rewards import REWARDS, SERVED
from megarl.rewards.scoring.calling import PARAMETERS, bind
from megarl.sandbox.layers import LAYERS
from megarl.sandbox.sandbox import Sandbox, SandboxSettings
from megarl.tracking.metric_table import find_row, rows
from megarl.tracking.trackers import TRACKERS
from megarl.types import Problem, ToolCall
from tools import read_aloud

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
RECIPES = "launch/recipes/README.md"
REWARD_GUIDE = "megarl/rewards/README.md"
MATHS_GUIDE = "megarl/rewards/maths/README.md"
ENVIRONMENT_GUIDE = "megarl/environments/README.md"
SANDBOX_GUIDE = "megarl/sandbox/README.md"
ATTEMPT_GUIDE = "megarl/sandbox/containers/README.md"
RESHARD_GUIDE = "megarl/reshard/README.md"
LOOP_GUIDE = "megarl/loops/README.md"
TRAINING_GUIDE = "megarl/training/README.md"
TRACKING_GUIDE = "megarl/tracking/README.md"
SLURM_GUIDE = "launch/slurm/README.md"
CONTAINER_GUIDE = "launch/container/README.md"
ALGORITHM_GUIDE = "megarl/algorithms/README.md"
SERVICE_GUIDE = "megarl/service/README.md"
GUIDES = (
    RECIPES, REWARD_GUIDE, ENVIRONMENT_GUIDE, SANDBOX_GUIDE, RESHARD_GUIDE, LOOP_GUIDE, TRAINING_GUIDE, TRACKING_GUIDE,
    SLURM_GUIDE, CONTAINER_GUIDE, MATHS_GUIDE, ALGORITHM_GUIDE, ATTEMPT_GUIDE, SERVICE_GUIDE,
)  # fmt: skip
PAGES = (README, *GUIDES)
# README and guides aim at about 1,800 words. The margin is there so that no sentence is bent to fit a count.
MOST_WORDS = dict.fromkeys(PAGES, 2000)
MOST_WORDS_OF_A_SENTENCE = 20
OPENINGS = ("Of ", "Those ", "Who ", "What ", "As of ")

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, pages: Sequence[str] = PAGES) -> list[Any]:
    """The code blocks of a language as parameters, with page and number as id."""
    return [
        pytest.param(source, id=f"{page} {number}")
        for page in pages
        for number, (found, source) in enumerate(_FENCED.findall(text_of(page)), start=1)
        if found == language
    ]


def block(language: str, containing: str) -> str:
    """The only block of a language with a text."""
    [found] = [source for parameter in blocks(language) if containing in (source := parameter.values[0])]
    return found


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page's prose, without code, tables and headings. A list item begins a sentence."""
    prose = [line for line in _FENCED.sub("", text_of(page)).splitlines() if not line.startswith(("|", "#", "!"))]
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=- |\d\. )", "\n".join(prose)):
        yield from re.split(r"(?:(?<=[.:;!?])|(?<=[.:;!?]\*\*))\s+", " ".join(paragraph.split()).removeprefix("- "))


def test_every_page_with_code_is_known() -> None:
    elsewhere = {".github/CONTRIBUTING.md", "tests/gpu/README.md", "tools/standin_gpu/README.md"}
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/README.md") if "runs" not in path.parts}
    assert found - elsewhere == set(GUIDES)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    assert len(text_of(page).split()) <= MOST_WORDS[page]


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_fit_into_120_characters(page: str) -> None:
    prose = _FENCED.sub("", text_of(page)).splitlines()
    # A row of a table cannot be wrapped.
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_read_plainly(page: str) -> None:
    found = list(sentences(page))
    words = [word.lower() for sentence in found for word in re.findall(r"[A-Za-z']+", sentence)]
    assert len(found) > 10
    assert [s for s in found if len(s.split()) > MOST_WORDS_OF_A_SENTENCE] == []
    assert [s for s in found if s.startswith(OPENINGS)] == []
    assert [s for s in found if re.search(read_aloud.UNCLEAR, s)] == []
    assert 100 * sum(word in read_aloud.RELATIVE for word in words) / len(words) <= 1.4


# Links.


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ".github/CONTRIBUTING.md", "launch/recipes/MIGRATION.md"])
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", text_of(page))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_readme_leads_to_all_guides_and_references() -> None:
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text_of(README))}
    references = {"launch/recipes/FIELDS.md", "launch/recipes/MIGRATION.md", "megarl/tracking/METRICS.md"}
    assert {*GUIDES, *references, ".github/CONTRIBUTING.md"} - linked == set()


# Lists and names.


def literals(model: type, field: str) -> tuple[str, ...]:
    """The values that a field of a choice may have."""
    return get_args(model.model_fields[field].annotation)  # type: ignore[attr-defined]


def rooms() -> list[str]:
    # `megarl/tools` is a link for the build of wheels.
    folders = {path.parent.name for path in (ROOT / "megarl").glob("*/*.py") if not path.parent.is_symlink()}
    files = [path.stem for path in (ROOT / "megarl").glob("*.py") if not path.stem.startswith("__")]
    return sorted([*(f"{name}/" for name in folders), *files])


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param(REWARD_GUIDE, [*REWARDS, *SERVED], id="rewards"),
        pytest.param(REWARD_GUIDE, list(PARAMETERS), id="parameters of a reward function"),
        pytest.param(ENVIRONMENT_GUIDE, list(ENVIRONMENTS), id="environments"),
        pytest.param(RECIPES, [path.name for path in (ROOT / "launch/recipes").glob("*.yaml")], id="recipes"),
        pytest.param(RECIPES, literals(Recipe, "loop"), id="loops"),
        pytest.param(RECIPES, literals(AlgorithmConfig, "kl_estimator"), id="KL estimators"),
        pytest.param(SANDBOX_GUIDE, LAYERS, id="layers of the sandbox"),
        pytest.param(TRACKING_GUIDE, get_args(RuleName), id="health rules"),
        pytest.param(README, rooms(), id="rooms"),
    ],
)
def test_lists_are_complete(page: str, names: Sequence[str]) -> None:
    assert len(names) > 3
    assert [name for name in names if f"`{name}`" not in text_of(page)] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param(README, literals(Recipe, "loop"), id="loops"),
        pytest.param(README, list(FAMILIES), id="model families"),
        pytest.param(SLURM_GUIDE, literals(ClusterConfig, "launcher")[1:], id="launchers"),
        pytest.param(TRACKING_GUIDE, list(TRACKERS), id="trackers"),
    ],
)
def test_choices_are_named(page: str, names: Sequence[str]) -> None:
    written = text_of(page).lower().replace("-", "_")
    assert len(names) > 1
    assert [name for name in names if not re.search(rf"\b{name}\b", written)] == []


def test_exit_codes_are_those_of_the_errors() -> None:
    tree = ast.parse((ROOT / "megarl/types.py").read_text(encoding="utf-8"))
    codes = {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "exit_code"
        and isinstance(node.value, ast.Constant)
    }
    table = text_of(LOOP_GUIDE).partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes | {0}


def test_named_fields_are_fields_of_the_recipe() -> None:
    sections = {
        name: field.annotation for name, field in Recipe.model_fields.items() if "Config" in str(field.annotation)
    }
    written = "\n".join(map(text_of, PAGES))
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)[`=:]", written))
    assert len(named) > 60
    unknown = []
    for path in sorted(named):
        section, field, *_ = path.split(".")
        fields = getattr(sections[section], "model_fields", {})
        if field not in fields:
            unknown.append(path)
    assert unknown == []


@pytest.mark.parametrize("page", [*PAGES, ".github/CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    named = set(re.findall(r"\b(?:megarl|tools|launch|tests|checkpoints_convert)/[\w./-]*\w(?![\w*])", text_of(page)))
    # `tools/NAME/calls` is a metric, and a site writes its own site.env.
    files = {path for path in named - {"launch/slurm/site.env"} if "NAME" not in path and find_row(path) is None}
    assert files
    assert [path for path in sorted(files) if not (ROOT / path).exists()] == []


def test_named_checks_exist() -> None:
    named = set(re.findall(r"tools/check\.py (\w+)", "\n".join(map(text_of, PAGES))))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / f"tools/checks/{name}.py").exists()] == []


def test_named_metrics_are_logged() -> None:
    groups = {row.name.partition("/")[0] for row in rows()}
    written = "\n".join(map(text_of, PAGES))
    named = set(re.findall(rf"`((?:{'|'.join(groups)})/[\w/]*\w)`", written))
    assert len(named) > 40
    assert [name for name in sorted(named) if find_row(name) is None] == []


# Code blocks.


def test_every_code_block_is_checked() -> None:
    checked = {"bash", "yaml", "python", "mermaid", "text"}
    assert {language for page in PAGES for language, _ in _FENCED.findall(text_of(page))} <= checked
    assert all(text_of(page).count("\n```") % 2 == 0 for page in PAGES)
    # One text block is the quickstart's table: tests/tools/test_quickstart_curve.py compares it with the curve. One is
    # the path of a tensor below. One is an attempt's sequences: tests/serving/agents/test_credit.py makes them.
    assert len(blocks("text")) == 3


def test_the_path_of_a_tensor_names_files_and_their_classes() -> None:
    path = _FENCED.search(text_of(ROOT / "megarl/reshard/README.md"))
    assert path is not None and path[1] == "text"
    lines = path[2].strip().splitlines()
    assert len(lines) == 8
    for line in lines:
        file, names = re.split(r" {2,}", line)[:2]
        source = (ROOT / "megarl" / file).read_text()
        for name in names.split(", "):
            owner, _, method = name.partition(".")
            assert f"class {owner}" in source and f"def {method}" in source, line


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The README's own recipe as a file."""
    path = tmp_path / "my_recipe.yaml"
    path.write_text(block("yaml", "name: qwen3-math"))
    return path


def with_block(base: Path, source: str) -> Path:
    """Write the README's recipe with the sections of another block, into the same file."""
    recipe, given = yaml.safe_load(base.read_text()), yaml.safe_load(source)
    if "mixture" in given:
        # The sources have the data.
        recipe["data"] = {}
    if given.get("loop") == "distillation":
        del recipe["reward"]
    base.write_text(yaml.safe_dump(recipe | given))
    return base


@pytest.mark.parametrize("source", blocks("yaml"))
def test_recipes_are_read(base: Path, source: str) -> None:
    assert load(with_block(base, source)).name == "qwen3-math"


def test_the_readmes_recipe_is_short() -> None:
    assert len(block("yaml", "name: qwen3-math").splitlines()) <= 15


@pytest.mark.parametrize(
    ("containing", "value", "expected"),
    [
        ("short_and_right", lambda r: [f.name for f in r.reward.functions], ["boxed", "my/rewards.py:short_and_right"]),
        ("my/judge.txt", lambda r: [f.name for f in r.reward.functions], ["format", "judge"]),
        ("mixture:", lambda r: {s.name: s.weight for s in r.sources}, {"sums": 3.0, "games": 1.0}),
        ("my/agent.py", lambda r: r.rollout.agent.command, ("python", "my/agent.py")),
        ("my/shop.py", lambda r: r.rollout.environment, "my/shop.py:Shop"),
        ("my/learning.py", lambda r: r.algorithm.policy_loss, "my/learning.py:leaky"),
        ("teacher: models/Qwen3-32B", lambda r: r.teachers, {"teacher0": "models/Qwen3-32B"}),
        ("teacher: reference", lambda r: r.teacher_models, ("reference",)),
        ("groups:", lambda r: r.cluster.groups.engines.gpu_memory_gib, "h100"),
    ],
)
def test_recipes_say_what_the_text_says(
    base: Path, containing: str, value: Callable[[Recipe], Any], expected: Any
) -> None:
    assert value(load(with_block(base, block("yaml", containing)))) == expected


def namespace(source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(source, "guide.py", "exec"), found)
    return found


def check_reward(source: str) -> None:
    bound = bind("short_and_right", namespace(source)["short_and_right"], {"longest": 50})
    values = {"completion_text": " 7 ", "answer": "7", "num_tokens": 50}
    assert bound.needs == set(values)
    assert bound(values) == 1.0 and bound(values | {"num_tokens": 51}) == 0.0


def check_sandbox_reward(source: str) -> None:
    with contextlib.closing(Sandbox(SandboxSettings(require=(), packages=()))) as sandbox:
        bound = bind("greets", namespace(source)["greets"], {})
        program = "print('hello', input())"
        assert bound.needs == {"completion_text", "sandbox"}
        assert bound({"completion_text": program, "sandbox": sandbox}) == 1.0
        assert bound({"completion_text": "1 / 0", "sandbox": sandbox}) == 0.0


def check_tools(source: str) -> None:
    shop = namespace(source)["Shop"](tool_seconds=5)
    calls = (ToolCall("a", "price", {"item": "tea", "count": 2}), ToolCall("b", "price", {"item": "salt"}))
    step = asyncio.run(shop.step(Turn(0, "", "stop", calls=calls)))
    assert [message["content"] for message in step.messages] == ["6", "error: KeyError: 'salt'"]
    assert shop.tools[0]["function"]["description"] == "The price of some items in euros."


def check_environment(source: str) -> None:
    async def rewards(*answers: str) -> list[tuple[float | None, bool]]:
        echo = namespace(source)["Echo"]()
        start = await echo.reset(Problem(0, ({"role": "system", "content": "Obey."},), (), "yes"), 1)
        assert [message["content"] for message in start.messages] == ["Obey.", "Write yes."]
        steps = [await echo.step(Turn(number, text, "stop")) for number, text in enumerate(answers)]
        await echo.close()
        return [(step.reward, step.done) for step in steps]

    assert asyncio.run(rewards("no", "yes")) == [(0.0, False), (1.0, True)]
    assert asyncio.run(rewards("no", "no", "no"))[-1] == (0.0, True)


def check_agent(source: str) -> None:
    # tools/check_agents.py runs such programs against a real endpoint.
    assert compile(source, "agent.py", "exec")


def check_formulas(source: str) -> None:
    Path("my").mkdir()
    Path("my/learning.py").write_text(source)
    Path("recipe.yaml").write_text(block("yaml", "name: qwen3-math"))
    loaded = load(with_block(Path("recipe.yaml"), block("yaml", "my/learning.py")), ["algorithm.clip_high=0.3"])
    assert list(check_keywords(loaded)) == []
    function = import_object("my/learning.py:by_best", "algorithm.advantage")
    found = function(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([7, 7, 2]), lengths=torch.tensor([10, 20, 100]))
    assert found.tolist() == pytest.approx([-1.01, -0.02, -0.1])


def check_api(source: str) -> None:
    # tests/test_api.py trains by it. Here the program reads a run of two steps.
    Path("runs").mkdir()
    Path("runs/config.yaml").write_text("name: runs\n")
    Path("runs/metrics.jsonl").write_text("".join(json.dumps({"step": n, "reward/mean": 0.5}) + "\n" for n in (1, 2)))
    arguments = []
    own = SimpleNamespace(train=lambda *given: (arguments.append(given), megarl.load_run("runs"))[1])
    exec(source.replace("import megarl\n", ""), {"megarl": own, "__name__": "__main__"})
    assert inspect.signature(megarl.train).bind(*arguments[0]).arguments["overrides"] == {"train.steps": 3}


PROGRAMS = {
    "megarl.train(": check_api,
    "def short_and_right": check_reward,
    "def greets": check_sandbox_reward,
    "class Shop": check_tools,
    "class Echo": check_environment,
    "OpenAI()": check_agent,
    "def leaky": check_formulas,
    # A run needs an endpoint: tests/serving/agents/client_harness.py runs the same command.
    "MSWEA_CONFIGURED": lambda source: compile(source, "run.py", "exec"),
}


@pytest.mark.parametrize("source", blocks("python"))
def test_programs_run(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [check] = [check for containing, check in PROGRAMS.items() if containing in source]
    check(source)


OTHER_PROGRAMS = {
    "git",
    "cd",
    "cp",
    "tail",
    "grep",
    "tensorboard",
    "docker",
    "apptainer",
    "kubectl",
    "sky",
    "vllm",
    "envsubst",
    "export",
    "python3",
    "pip",
    "sbatch",
}


def commands(source: str) -> Iterator[list[str]]:
    """The commands of a shell block, without comments and redirections."""
    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command, words = words[:end], words[end + 1 :]
            yield command[: command.index(">")] if ">" in command else command


def check_megarl(arguments: list[str], base: Path) -> None:
    """Parse a command line of megarl, and read its recipe with its overrides."""
    command, context = get_command(app), None
    while hasattr(command, "resolve_command"):
        context = command.make_context("megarl", arguments[:1], parent=context, resilient_parsing=True)
        _, command, arguments = command.resolve_command(context, arguments)  # type: ignore[attr-defined]
    parsed = command.make_context("megarl", arguments, parent=context).params
    if "recipe" in parsed and "overrides" in parsed and parsed["recipe"] is not None:
        own = ROOT / str(parsed["recipe"])
        assert load(own if own.is_file() else base, parsed["overrides"] or ()).name


def check_script(path: str, options: list[str]) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert [option for option in options if option.startswith("--") and option not in source] == []


@pytest.mark.parametrize("source", blocks("bash"))
def test_commands_are_understood(source: str, base: Path) -> None:
    found = list(commands(source))
    assert found
    for words in found:
        if words[0] == "salloc":
            words = words[words.index(".venv/bin/megarl") :]
        # An assignment is no command.
        if re.fullmatch(r"\w+=.*", words[0], re.DOTALL) and len(words) == 1:
            continue
        program, arguments = words[0], words[1:]
        if program == ".venv/bin/megarl":
            check_megarl(arguments, base)
        elif program == ".venv/bin/python":
            check_script(arguments[0], arguments[1:])
        elif program.startswith("launch/"):
            check_script(program, arguments)
        else:
            assert Path(program).name in OTHER_PROGRAMS


@pytest.mark.parametrize("source", blocks("mermaid"))
def test_diagrams_name_their_participants(source: str) -> None:
    kind, *lines = [line.strip() for line in source.splitlines()]
    participants = {name for line in lines for name in re.findall(r"^participant (\w+) as ", line)}
    arrows = [re.fullmatch(r"(\w+)-?->>(\w+): .+", line) for line in lines if not line.startswith("participant")]
    assert kind == "sequenceDiagram" and len(arrows) > 5
    assert {end for arrow in arrows for end in (arrow.groups() if arrow else ("?",))} == participants


def test_places_of_the_gpu_guide_are_in_the_code() -> None:
    """A row names files of the package, or a name in one: `models/policy.py`, `platform/device.cuda_toolkit`."""
    guide = (ROOT / "tests/gpu/README.md").read_text(encoding="utf-8").partition("## What to look at first")[2]
    cells = re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)
    assert len(cells) > 20
    for place in (place for cell in cells for place in re.findall(r"`([^`]+)`", cell)):
        module, _, name = place.partition(".")
        file = ROOT / "megarl" / f"{module}.py"
        assert file.is_file(), place
        assert name == "py" or re.search(rf"\b{name.rpartition('.')[2]}\b", file.read_text(encoding="utf-8")), place
