"""`megarl eval`: what does not fit is one error before anything starts or is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.loops.commands.evaluation import prepare
from megarl.types import ConfigError, MegarlError


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose training data and model are elsewhere."""
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"messages": {"role": "user", "content": "1 + 2"}, "gt_answer": "3"})
    Path("heldout.jsonl").write_text(line + "\n")
    sections = {
        "name": "small",
        "loop": "rl",
        "model": {"path": "not/here"},
        "data": {
            "train": "not_here.jsonl",
            "validation": {"easy": "heldout.jsonl", "hard": "heldout.jsonl"},
            "max_prompt_tokens": 40,
        },
        "rollout": {"sampling": {"max_new_tokens": 24}},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(sections))
    return Path("recipe.yaml")


def test_a_recipe_is_prepared_for_another_model_without_its_training_data(
    recipe: Path, tiny_model: Callable[..., Path]
) -> None:
    options = {"samples_per_prompt": 4, "k": [1, 4], "sampling.temperature": 0.5}
    found = prepare(tiny_model(), recipe, [], options=options, sets=["hard"])
    assert found.model == tiny_model() and found.recipe.model.path == str(tiny_model())
    assert found.sets == {"hard"}
    assert (found.recipe.evaluation.samples_per_prompt, found.recipe.evaluation.ks) == (4, (1, 4))
    assert found.recipe.evaluation_sampling.temperature == 0.5
    assert found.folder == Path("evaluations") / f"{tiny_model().name}_small"
    assert found.folder.is_dir() and not any(found.folder.iterdir())
    again = prepare(tiny_model(), recipe, ["evaluation.max_problems=1"], options={})
    assert again.folder == Path("evaluations") / f"{tiny_model().name}_small_2" and again.sets == {"easy", "hard"}


def test_another_model_keeps_its_own_config(recipe: Path, tiny_model: Callable[..., Path]) -> None:
    own, given = ["model.override_config.rope_theta=5.0e5"], f"model.path={tiny_model()}"
    sections = yaml.safe_load(recipe.read_text())
    sections["model"]["override_config"] = {"rope_theta": 3e5}
    recipe.write_text(yaml.safe_dump(sections))
    found = [prepare(tiny_model(), recipe, overrides, options={}) for overrides in ([], own, [given])]
    assert [of.recipe.model.override_config for of in found] == [{}, {"rope_theta": 5e5}, {"rope_theta": 3e5}]


def test_models_that_only_train_need_not_be_there(recipe: Path, tiny_model: Callable[..., Path]) -> None:
    for overrides in (
        ["loop=distillation", "distillation.teacher=not/here"],
        ["algorithm.advantage=gae", "critic.path=not/here"],
    ):
        assert prepare(tiny_model(), recipe, overrides, options={}).folder.is_dir()


def test_engines_of_another_kind_are_left_to_runs_that_train(recipe: Path, tiny_model: Callable[..., Path]) -> None:
    kinds = "cluster.groups.engines={nodes: 3, ranks_per_node: 2}"
    separate = ["rollout.placement=separate", "rollout.max_staleness=1", "algorithm.importance_sampling=tis", kinds]
    found = prepare(tiny_model(), recipe, separate, options={})
    assert found.recipe.cluster.groups.engines is None and found.parallel.num_ranks == found.recipe.cluster.world_size


def test_of_a_run_the_last_or_the_best_model(recipe: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "runs/a"
    shutil.copytree(tiny_model(), run / "hf_best")
    (run / "config.yaml").write_text("")
    with pytest.raises(MegarlError, match="it has the model of its best evaluation, hf_best"):
        prepare(run, recipe, [], options={})
    found = prepare(run, recipe, [], options={}, is_best=True)
    assert (found.model, found.folder) == (run / "hf_best", run / "evaluations/hf_best_small")
    with pytest.raises(MegarlError, match=r"has no model of a best evaluation"):
        prepare(tiny_model(), recipe, [], options={}, is_best=True)


@pytest.mark.parametrize(
    ("overrides", "given", "message"),
    [
        ([], {"sets": ["esy"]}, "--set esy: is not a validation set of recipe.yaml; give easy or hard"),
        ([], {"options": {"samples_per_prompt": 4, "k": [8]}}, "evaluation.k = [8]"),
        ([], {"options": {"samples_per_prompt": 4, "sampling.temperature": 0.0}}, "all attempts at a problem are the"),
        ([], {"options": {"k": [0]}}, "evaluation.k.0 = 0"),
        ([], {"out": Path("heldout.jsonl")}, "--out heldout.jsonl: already exists"),
        (["data.validation.easy=no.jsonl"], {}, "no.jsonl"),
    ],
)
def test_what_does_not_fit_is_one_error_and_nothing_is_written(
    recipe: Path, tiny_model: Callable[..., Path], overrides: Sequence[str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(MegarlError) as caught:
        prepare(tiny_model(), recipe, overrides, **({"options": {}} | given))
    assert message in str(caught.value)
    assert not Path("evaluations").exists()


@pytest.mark.parametrize(
    ("loop", "validation", "message"),
    [
        ("preference", "{a: heldout.jsonl}", "loop = preference: samples no answers"),
        ("rl", "{}", r"has no data\.validation"),
    ],
)
def test_a_recipe_must_have_sets_and_sample_answers(
    recipe: Path, tiny_model: Callable[..., Path], loop: str, validation: str, message: str
) -> None:
    recipe.write_text(f"{{name: r, loop: {loop}, model: {{path: m}}, data: {{train: t, validation: {validation}}}}}")
    with pytest.raises(ConfigError, match=message):
        prepare(tiny_model(), recipe, [], options={})


@pytest.mark.parametrize("named", ["run/checkpoints/step_000004", "run/checkpoints", "run"])
def test_a_checkpoint_is_answered_with_the_command_that_makes_a_model_of_it(recipe: Path, named: str) -> None:
    for step in (2, 4):
        Path(f"run/checkpoints/step_{step:06}").mkdir(parents=True)
    Path("run/config.yaml").write_text(recipe.read_text())
    command = "megarl export run --step 4"
    with pytest.raises(MegarlError, match=f"^{named}: is neither a model folder nor a run.*{command}"):
        prepare(Path(named), recipe, [], options={})


@pytest.mark.parametrize("name", ["absent", "no_model"])
def test_a_folder_that_is_no_model_is_refused_by_name(recipe: Path, name: str) -> None:
    Path("no_model").mkdir()
    with pytest.raises(MegarlError, match=f"^{name}: is neither a model folder nor a run"):
        prepare(Path(name), recipe, [], options={})
