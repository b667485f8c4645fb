"""README's lists, links and examples against the code."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from megarl.config import AlgorithmConfig, ClusterConfig, Recipe
from megarl.config.recipe import load
from megarl.environments import ENVIRONMENTS, Turn
from megarl.families import FAMILIES
from megarl.files.import_path import import_object
from megarl.preflight.keyword_arguments import keywords
from megarl.rewards import REWARDS, SERVED
from megarl.rewards.calling import PARAMETERS, bind
from megarl.types import ToolCall

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def literals(model: type, field: str) -> tuple[str, ...]:
    """The values that a field of a choice may have."""
    return get_args(model.model_fields[field].annotation)  # type: ignore[attr-defined]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def rooms() -> list[str]:
    folders = [path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py")]
    files = [path.stem for path in (ROOT / "megarl").glob("*.py") if not path.stem.startswith("__")]
    return sorted([*(f"{name}/" for name in folders), *files])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*REWARDS, *SERVED], id="rewards"),
        pytest.param(list(ENVIRONMENTS), id="environments"),
        pytest.param(list(PARAMETERS), id="parameters of a reward function"),
        pytest.param([path.name for path in (ROOT / "launch/recipes").glob("*.yaml")], id="recipes"),
        pytest.param(literals(AlgorithmConfig, "kl_estimator"), id="KL estimators"),
        pytest.param(rooms(), id="rooms"),
    ],
)
def test_lists_are_complete(names: list[str]) -> None:
    assert names
    assert [name for name in names if f"`{name}`" not in README] == []


@pytest.mark.parametrize(
    "names", [literals(Recipe, "loop"), literals(ClusterConfig, "launcher")], ids=["loops", "launchers"]
)
def test_choices_are_told(names: tuple[str, ...]) -> None:
    assert len(names) > 2
    assert [name for name in names if not re.search(rf"\b{name}\b", README)] == []


def test_model_families_are_told() -> None:
    spoken = README.lower().replace("-", "_")
    assert [name for name in FAMILIES if not re.search(rf"\b{name}\b", spoken)] == []


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
    [told] = re.findall(r"^Exit codes: (.*?)\. The last", README, re.MULTILINE | re.DOTALL)
    assert {int(code) for code in re.findall(r"(?:^|,\s)(\d+) ", told)} == codes | {0}


def test_the_contents_are_the_chapters_in_order() -> None:
    contents = README.partition("Contents: ")[2].partition("\n## ")[0]
    anchors = re.findall(r"\(#([\w-]+)\)", contents)
    chapters = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert anchors == [re.sub(r"[^\w -]", "", chapter.lower()).replace(" ", "-") for chapter in chapters]


def test_named_fields_are_fields_of_the_recipe() -> None:
    sections = {
        name: field.annotation for name, field in Recipe.model_fields.items() if "Config" in str(field.annotation)
    }
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)[`=]", README))
    assert len(named) > 20
    unknown = []
    for path in sorted(named):
        section, field, *_ = path.split(".")
        fields = getattr(sections[section], "model_fields", {})
        if field not in fields:
            unknown.append(path)
    assert unknown == []


def test_the_recipe_is_read(tmp_path: Path) -> None:
    recipe, functions, served, mixture, agent, formulas, distilled = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert load(tmp_path / "recipe.yaml", []).data.system_prompt == "default"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | yaml.safe_load(functions)))
    names = [function.name for function in load(tmp_path / "recipe.yaml", []).reward.functions]
    assert names == ["boxed", "my/rewards.py:short_and_right"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | yaml.safe_load(served)))
    names = [function.name for function in load(tmp_path / "recipe.yaml", []).reward.functions]
    assert names == ["format", "judge"]
    of_sources = yaml.safe_load(recipe) | yaml.safe_load(mixture) | {"data": {}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(of_sources))
    sources = load(tmp_path / "recipe.yaml", []).sources
    assert {source.name: source.weight for source in sources} == {"sums": 3.0, "games": 1.0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | yaml.safe_load(agent)))
    assert load(tmp_path / "recipe.yaml", []).rollout.agent.command == ("python", "my/agent.py")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | yaml.safe_load(formulas)))
    assert load(tmp_path / "recipe.yaml", []).algorithm.policy_loss == "my/learning.py:leaky"
    from_teacher = {name: section for name, section in yaml.safe_load(recipe).items() if name != "reward"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(from_teacher | yaml.safe_load(distilled)))
    assert load(tmp_path / "recipe.yaml", []).teachers == {"teacher0": "models/Qwen3-32B"}


def test_the_reward_function_is_called() -> None:
    source, _, agent, _ = blocks("python")
    assert "OpenAI()" in agent and compile(agent, "agent.py", "exec")
    found: dict[str, object] = {}
    exec(source, found)
    [function] = [value for name, value in found.items() if name == "short_and_right"]
    bound = bind("short_and_right", function, {"longest": 50})  # type: ignore[arg-type]
    values = {"completion_text": " 7 ", "answer": "7", "num_tokens": 50}
    assert bound.needs == set(values)
    assert bound(values) == 1.0 and bound(values | {"num_tokens": 51}) == 0.0


def test_the_environment_replies_to_a_call() -> None:
    _, source, _, _ = blocks("python")
    found: dict[str, object] = {}
    exec(source, found)
    shop = found["Shop"]()  # type: ignore[operator]
    calls = (ToolCall("a", "price", {"item": "tea", "count": 2}), ToolCall("b", "price", {"item": "salt"}))
    step = asyncio.run(shop.step(Turn(0, "", "stop", calls=calls)))
    assert [message["content"] for message in step.messages] == ["6", "error: KeyError: 'salt'"]
    assert shop.tools[0]["function"]["description"] == "The price of some items in euros."


def test_the_loss_and_the_advantage_pass_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, *_, formulas, _ = blocks("yaml")
    *_, source = blocks("python")
    monkeypatch.chdir(tmp_path)
    Path("my").mkdir()
    Path("my/learning.py").write_text(source)
    Path("recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(recipe) | yaml.safe_load(formulas)))
    loaded = load("recipe.yaml", ["algorithm.clip_high=0.3"])
    assert list(keywords(loaded)) == []
    function = import_object("my/learning.py:by_best", "algorithm.advantage")
    found = function(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([7, 7, 2]), lengths=torch.tensor([10, 20, 100]))
    assert found.tolist() == pytest.approx([-1.01, -0.02, -0.1])
