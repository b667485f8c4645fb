"""What a resume looks at and refuses before it changes anything; whole runs are resumed in `end_to_end`."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from megarl.checkpoint.manifest import file_record, write_manifest
from megarl.config import OptimizerConfig, Recipe
from megarl.loops.saving.checkpointing import plain_recipe, survey_checkpoints
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.driver_state import read_driver
from megarl.loops.saving.resume import Origin, begin_from_copy, find_origin
from megarl.loops.saving.run_inputs import Inputs
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import DRIVER, SCHEMA, RunRecord
from megarl.types import ConfigError, DataError, StorageError
from tests.models.drafts.eagle3 import make_eagle3


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"hidden_size": 8, "_name_or_path": "here"}')
    with_weights(tmp_path / "model", 1)
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    return Recipe.model_validate(
        {
            "name": "small",
            "loop": "rl",
            "runs_folder": str(tmp_path),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "train.jsonl"), "validation": {"held": str(tmp_path / "heldout.jsonl")}},
        }
    )


@pytest.fixture
def home(recipe: Recipe) -> Path:
    """The checkpoints of a run that was stopped after step 4: those of steps 2 and 4, and half of one more."""
    with RunFolder(recipe) as folder:
        folder.begin()
        folder.set_status("running", step=4)
        folder.metrics_file.write_text('{"step": 3}\n{"step": 5}\n')
    for step in (2, 4):
        _write_checkpoint(folder.checkpoints_folder / f"step_{step:06d}", recipe, step)
    (folder.checkpoints_folder / ".step_000006.partial").mkdir()
    (folder.checkpoints_folder / "latest").write_text("step_000002\n")
    return folder.checkpoints_folder


def _write_checkpoint(
    folder: Path, recipe: Recipe, step: int, kept: dict[str, str] | None = None, without: Sequence[str] = ()
) -> None:
    folder.mkdir(parents=True)
    torch.save({}, folder / "common.pt")
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
    driver = {
        "schema": SCHEMA, "step": step, "recipe": plain_recipe(recipe), **Inputs.read(recipe, kept).as_json(),
        "unlogged": {"x": 1.0, "step": 9, "text": "no number"}, "outcome": {},
    }  # fmt: skip
    (folder / DRIVER).write_text(json.dumps({name: driver[name] for name in driver if name not in without}))
    write_manifest(folder, {path.name: file_record(path) for path in folder.iterdir()}, {"format": "torch_dist"})


def contents(folder: Path) -> dict[str, bytes | None]:
    """Names and bytes of all that a folder holds, but for the lock."""
    found = (path for path in folder.rglob("*") if "owners" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_checkpoint_that_cannot_be_read_is_not_condemned(home: Path) -> None:
    earlier, before = RunRecord.read(home.parent), contents(home.parent)
    assert survey_checkpoints(earlier).newest_intact == home / "step_000004"  # what it imports is imported
    with no_file_can_be_opened(), pytest.raises(StorageError, match=r"step_000004.*Too many open files") as caught:
        survey_checkpoints(earlier)
    assert caught.value.exit_code == 74
    assert contents(home.parent) == before
    assert survey_checkpoints(earlier).newest_intact == home / "step_000004"


def test_a_resume_on_a_full_disk_condemns_nothing(
    recipe: Recipe,
    home: Path,
    no_file_may_grow: Callable[[], AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(home.parent)
    with RunFolder(recipe, resume=True) as folder:
        with no_file_may_grow(), pytest.raises(StorageError, match=str(home.parent)):
            find_origin(recipe, folder, "if-any")
        assert before.items() <= contents(home.parent).items()
        origin = find_origin(recipe, folder, "if-any")
    assert origin.checkpoint == home / "step_000004"
    assert (home / "latest").read_text() == "step_000004\n"


@pytest.mark.parametrize(
    ("logged", "expected", "is_interrupted"),
    [
        # An earlier version logged a step after its evaluation; the checkpoint has the metrics of an interrupted one.
        ('{"step": 3}\n', '{"step": 3}\n{"step": 4, "evaluation_follows": true, "x": 1.0}\n', True),
        ('{"step": 3}\n{"step": 4, "x": 1.0, "val/a/accuracy": 0.5}\n{"step": 5}\n', None, False),
        ('{"step": 4, "evaluation_follows": true, "x": 2.0}\n', None, True),
        ('{"step": 4, "evaluation_follows": true}\n{"step": 4, "val/a/accuracy": 0.5}\n', None, False),
        # Not this version's word: the line counts as one without an evaluation.
        ('{"step": 4, "evaluation_follows": "yes"}\n', None, False),
    ],
)
def test_an_interrupted_evaluation_is_made_up_for_once(
    recipe: Recipe, home: Path, logged: str, expected: str | None, is_interrupted: bool
) -> None:
    file = home.parent / "metrics.jsonl"
    file.write_text(logged)
    with RunFolder(recipe, resume=True) as folder:
        find_origin(recipe, folder, "if-any")
        assert folder.lacks_evaluation is is_interrupted
    assert file.read_text() == (expected or logged.replace('{"step": 5}\n', ""))


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(recipe: Recipe, home: Path) -> None:
    (home / "step_000002").rename(home / "step_000002.damaged")
    with (home / "step_000004/common.pt").open("ab") as file:
        file.write(b"x")
    before = contents(home.parent)
    for _ in range(2):
        with (
            RunFolder(recipe, resume=True) as folder,
            pytest.raises(DataError, match=r"none of the run's 2 checkpoints can be loaded.*\n.*common\.pt: \d+ bytes"),
        ):
            find_origin(recipe, folder, "if-any")
        assert contents(home.parent) == before
    with RunFolder(recipe, restart=True) as folder:
        assert find_origin(recipe, folder, None).checkpoint is None
    assert not home.exists()
    (kept,) = (home.parent / "earlier").iterdir()
    assert (kept / "checkpoints/step_000002.damaged").is_dir() and (kept / "metrics.jsonl").exists()


def test_stray_names_beside_checkpoints_are_left_alone(recipe: Recipe, home: Path) -> None:
    for name in ("step_000001.bak", "step_x", ".step_mine", "notes"):
        (home / name).mkdir()
    (home / "step_000009").write_text("a file")
    with RunFolder(recipe, resume=True) as folder:
        assert find_origin(recipe, folder, "must").checkpoint == home / "step_000004"
    left = {path.name for path in home.iterdir()}
    assert {"step_000001.bak", "step_x", ".step_mine", "notes", "step_000009"} <= left


def test_changes_are_named_and_another_model_is_refused(
    recipe: Recipe, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"_name_or_path": "there", "hidden_size": 16}')
    train = recipe.train.model_copy(update={"steps": 77})
    changed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(other)}), "train": train})
    before = contents(home.parent)
    with RunFolder(changed, resume=True) as folder:
        with pytest.raises(ConfigError, match=rf"model\.path = {other}: is another model .*then: {tmp_path}/model\)"):
            find_origin(changed, folder, "if-any")
        assert contents(home.parent) == before
        # The same model in another place, and the same fields by the recipe.
        (other / "config.json").write_text('{"_name_or_path": "there", "hidden_size": 8}')
        find_origin(changed, folder, "if-any")
        (other / "config.json").write_text('{"hidden_size": 8, "rms_norm_eps": 1e-5}')
        with pytest.raises(ConfigError, match=r"its config\.json, or model\.override_config, differs"):
            find_origin(changed, folder, "if-any")
        (other / "config.json").write_text('{"hidden_size": 8}')
        overriding = changed.model.model_copy(update={"override_config": {"rms_norm_eps": 1e-5}})
        with pytest.raises(ConfigError, match=r"its config\.json, or model\.override_config, differs"):
            find_origin(changed.model_copy(update={"model": overriding}), folder, "if-any")
    printed = capsys.readouterr().out
    assert "changed since then: train.steps: 100 -> 77\n" in printed
    assert f"changed since then: model.path: {tmp_path}/model -> {other}\n" in printed


@pytest.mark.parametrize(("before", "now"), [("adam", "muon"), ("muon", "adam"), ("adam", "sgd"), ("sgd", "adam")])
def test_a_state_of_another_optimizer_is_refused(recipe: Recipe, home: Path, before: str, now: str) -> None:
    def with_optimizer(name: str) -> Recipe:
        return recipe.model_copy(update={"optimizer": OptimizerConfig.model_validate({"name": name})})

    _write_checkpoint(home / "step_000008", with_optimizer(before), 8)
    changed = with_optimizer(now)
    with RunFolder(changed, resume=True) as folder, pytest.raises(ConfigError) as caught:
        find_origin(changed, folder, "if-any")
    assert str(caught.value).startswith(f"optimizer.name = {now}: ") and f"optimizer.name={before}" in str(caught.value)


def with_weights(folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, num_files: int = 1) -> Path:
    """Give a model folder weights, in one file or several."""
    random = torch.Generator().manual_seed(seed)
    shapes = {f"layers.{number}.weight": (3, 40) for number in range(9)} | {"experts": (2, 3, 5), "norm": (7,), "x": ()}
    weights = {
        name: torch.randn(shape, generator=random).to(torch.bfloat16).to(dtype) for name, shape in shapes.items()
    }
    files = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


FROZEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "base of adapters": ({"lora": {"rank": 4}}, "model.path", "adapters alone"),
    "reference": ({"algorithm": {"kl_coefficient": 0.1}}, "model.path", "reference model"),
    "reward model": ({"reward": {"model": "judge"}}, "reward.model", "rewards or targets"),
}
"""Recipes with a model that is not trained: the changed sections, the model's field, words of the error."""


@pytest.mark.parametrize("kind", FROZEN)
def test_other_weights_of_a_model_that_is_not_trained_are_refused(recipe: Recipe, home: Path, kind: str) -> None:
    sections, field, words = FROZEN[kind]
    model = Path(recipe.model.path)
    folders = {name: shutil.copytree(model, model.with_name(name)) for name in ("judge", "moved", "other")}
    with_weights(folders["moved"], 1, dtype=torch.bfloat16, num_files=3)
    with_weights(folders["other"], 2)

    def with_model(folder: Path) -> Recipe:
        values = plain_recipe(recipe) | {name: dict(section) for name, section in sections.items()}
        section, name = field.split(".")
        values.setdefault(section, {})[name] = str(folder)
        return Recipe.model_validate(values)

    begun = with_model(folders["judge"] if field == "reward.model" else model)
    _write_checkpoint(home / "step_000008", begun, 8)
    before = contents(home.parent)
    with RunFolder(begun, resume=True) as folder:
        with pytest.raises(ConfigError) as caught:
            find_origin(with_model(folders["other"]), folder, "if-any")
        assert contents(home.parent) == before
        assert f"{field} = {folders['other']}: has other weights than the run began with" in str(caught.value)
        assert words in str(caught.value)
        origin = find_origin(with_model(folders["moved"]), folder, "if-any")
        with pytest.raises(ConfigError, match="has other weights"):
            begin_from_copy(origin, with_model(folders["other"]), folder)


def test_the_first_weights_of_a_policy_that_a_checkpoint_has_may_change(recipe: Recipe, home: Path) -> None:
    _write_checkpoint(home / "step_000008", recipe, 8)
    with_weights(Path(recipe.model.path), 2)
    with RunFolder(recipe, resume=True) as folder:
        assert find_origin(recipe, folder, "if-any").checkpoint == home / "step_000008"


@pytest.mark.parametrize(
    ("before", "now", "field", "remedy"),
    [
        (
            {"rank": 4},
            {"rank": 4, "targets": ["qkv_proj"]},
            "lora.targets = [qkv_proj]",
            "lora.targets=[qkv_proj,o_proj,",
        ),
        ({"rank": 4, "targets": ["o_proj"]}, {"rank": 4}, "lora.targets = [qkv_proj, ", "lora.targets=[o_proj]"),
        ({"rank": 4}, {"rank": 8}, "lora.rank = 8", "lora.rank=4"),
        ({"rank": 4}, {}, "lora.rank = 0", "lora.rank=4"),
        ({}, {"rank": 4}, "lora.rank = 4", "lora.rank=0"),
        ({"rank": 4}, {"rank": 4, "alpha": 16}, "lora.alpha = 16.0", "lora.alpha=32.0"),
        (
            {"rank": 4, "rank_stabilised": True},
            {"rank": 4},
            "lora.rank_stabilised = false",
            "lora.rank_stabilised=true",
        ),
    ],
)
def test_adapters_that_a_checkpoint_lacks_or_would_lose_are_refused(
    recipe: Recipe, home: Path, before: dict[str, Any], now: dict[str, Any], field: str, remedy: str
) -> None:
    def with_adapters(values: dict[str, Any]) -> Recipe:
        return Recipe.model_validate(plain_recipe(recipe) | {"lora": values})

    _write_checkpoint(home / "step_000008", with_adapters(before), 8)
    changed = with_adapters(now)
    with RunFolder(changed, resume=True) as folder:
        with pytest.raises(ConfigError) as caught:
            find_origin(changed, folder, "if-any")
        assert str(caught.value).startswith(f"{field}") and f"set {remedy}" in str(caught.value)
        same = with_adapters(before)
        assert find_origin(same, folder, "if-any").checkpoint == home / "step_000008"


BAND = {"band": [0.1, 0.9]}
OTHER_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a critic lost": (
        {"algorithm": {"preset": "ppo"}},
        {"algorithm": {"preset": "grpo"}},
        "algorithm.advantage = grpo: the checkpoint has a critic",
        "algorithm.advantage=gae",
    ),
    "a critic missing": (
        {"algorithm": {"preset": "grpo"}},
        {"algorithm": {"preset": "ppo"}},
        "algorithm.advantage = gae: the checkpoint has no state of a critic",
        "algorithm.advantage=grpo",
    ),
    "MTP layers lost": (
        {"trainer": {"mtp_loss_coefficient": 0.1}},
        {},
        "trainer.mtp_loss_coefficient = null: the checkpoint has trained MTP layers",
        "trainer.mtp_loss_coefficient=0.1",
    ),
    "MTP layers missing": (
        {},
        {"trainer": {"mtp_loss_coefficient": 0.1}},
        "trainer.mtp_loss_coefficient = 0.1: the checkpoint has no state of trained MTP layers",
        "trainer.mtp_loss_coefficient=null",
    ),
    "a moved reference": (
        {"algorithm": {"kl_coefficient": 0.1, "reference_update_steps": 4}},
        {},
        "algorithm.kl_coefficient = 0.0: the checkpoint has an updated reference model",
        "algorithm.kl_coefficient=0.1",
    ),
    "a moved reference of a preference loss": (
        {"loop": "preference", "algorithm": {"reference_update_steps": 4}},
        {"loop": "preference", "preference": {"loss": "simpo"}},
        "preference.loss = simpo: the checkpoint has an updated reference model",
        "set preference.loss=dpo,",
    ),
    "a moved teacher": (
        {"loop": "distillation", "distillation": {"teacher": "reference"}, "algorithm": {"reference_update_steps": 4}},
        {"loop": "distillation", "distillation": {"teacher": "policy"}},
        "distillation.teacher = policy: the checkpoint has an updated reference model",
        "set distillation.teacher=reference,",
    ),
    "another loop": ({}, {"loop": "sft"}, "loop = sft: the checkpoint is of a run with loop = rl", "name=NAME"),
    "solve rates": (
        {"data": {"curriculum": BAND}},
        {"data": {"curriculum": BAND | {"by": "level"}}},
        "data.curriculum.by = level: the checkpoint has solve rates by null",
        "data.curriculum.by=null",
    ),
}
"""Sections of the recipe when a run began, and when it is resumed, with the error's beginning and its remedy."""


@pytest.mark.parametrize("kind", OTHER_PARTS)
def test_a_state_that_the_checkpoint_lacks_or_would_lose_is_refused(recipe: Recipe, home: Path, kind: str) -> None:
    before, now, error, remedy = OTHER_PARTS[kind]

    def with_sections(sections: dict[str, Any]) -> Recipe:
        values = plain_recipe(recipe)
        merged = {name: values[name] | part if name == "data" else part for name, part in sections.items()}
        return Recipe.model_validate(values | merged)

    begun, changed = with_sections(before), with_sections(now)
    _write_checkpoint(home / "step_000008", begun, 8)
    with RunFolder(changed, resume=True) as folder:
        with pytest.raises(ConfigError) as caught:
            find_origin(changed, folder, "if-any")
        assert str(caught.value).startswith(error) and remedy in str(caught.value)
        assert find_origin(begun, folder, "if-any").checkpoint == home / "step_000008"


DECAYING = {"optimizer": {"schedule": "linear"}}
ADAPTED = {"kl_coefficient": 0.1, "kl_target": 0.05}
OTHER_COUNTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "updates": (
        DECAYING | {"train": {"updates_per_step": 4}},
        DECAYING,
        "train.updates_per_step = 1: optimizer.schedule = linear ",
    ),
    "passes": (
        DECAYING,
        DECAYING | {"train": {"epochs_per_step": 2}},
        "train.epochs_per_step = 2: optimizer.schedule = linear ",
    ),
    "critic's": (
        {"algorithm": {"preset": "ppo"}, "critic": DECAYING},
        {"algorithm": {"preset": "ppo"}, "critic": DECAYING | {"updates_per_step": 2}},
        "critic.updates_per_step = 2: critic.optimizer.schedule = linear ",
    ),
    "the critic's warm-up": (
        DECAYING | {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 4}},
        DECAYING | {"algorithm": {"preset": "ppo"}},
        "critic.warmup_steps = 0: optimizer.schedule = linear ",
    ),
    "coefficient": (
        {"algorithm": ADAPTED},
        {"algorithm": ADAPTED | {"kl_coefficient": 0.5}},
        "algorithm.kl_coefficient = 0.5: ",
    ),
}
"""Sections of the recipe when a run began, and when it is resumed, with the beginning of the error."""
SAME_COUNTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a constant rate": ({"train": {"updates_per_step": 4}}, {}),
    "as many updates": (
        DECAYING | {"train": {"updates_per_step": 2}},
        DECAYING | {"train": {"epochs_per_step": 2}},
    ),
    "a warm-up before a constant rate": (
        {"algorithm": {"preset": "ppo"}},
        {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 4}},
    ),
    "no target": ({"algorithm": {"kl_coefficient": 0.1}}, {"algorithm": {"kl_coefficient": 0.5}}),
}


def _change(recipe: Recipe, sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(plain_recipe(recipe) | sections)


@pytest.mark.parametrize("kind", OTHER_COUNTS)
def test_what_the_checkpoint_s_counts_would_contradict_is_refused(recipe: Recipe, home: Path, kind: str) -> None:
    before, now, error = OTHER_COUNTS[kind]
    _write_checkpoint(home / "step_000008", _change(recipe, before), 8)
    changed = _change(recipe, now)
    with RunFolder(changed, resume=True) as folder, pytest.raises(ConfigError) as caught:
        find_origin(changed, folder, "if-any")
    assert str(caught.value).startswith(error)


USEFUL_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rates": ({}, {"optimizer": {"learning_rate": 5e-6, "warmup_steps": 3, "betas": [0.9, 0.99], "weight_decay": 0.1}}),
    "a schedule": ({}, {"optimizer": {"schedule": "cosine", "warmup_ratio": 0.1}}),
    "steps": ({"optimizer": {"schedule": "linear"}}, {"optimizer": {"schedule": "linear"}, "train": {"steps": 500}}),
    "batch": ({}, {"train": {"prompts_per_step": 64, "samples_per_prompt": 4, "updates_per_step": 2}}),
    "saving": ({}, {"checkpoint": {"every_steps": 5, "keep": 4, "asynchronous": False, "export_every_steps": 10}}),
    "evaluation": ({}, {"evaluation": {"every_steps": 3, "samples_per_prompt": 4}}),
    "tracking": ({}, {"trackers": []}),
    "sizes": ({}, {"cluster": {"nodes": 2, "ranks_per_node": 8}, "trainer": {"tp": 2, "pp": 2}}),
    "memory": ({}, {"trainer": {"recompute": "full", "max_tokens_per_microbatch": 4096, "offload": ["optimizer"]}}),
    "advantages": ({}, {"algorithm": {"advantage": "rloo"}}),
    "a KL penalty": ({}, {"algorithm": {"kl_coefficient": 0.1}}),
    "no KL penalty": ({"algorithm": {"kl_coefficient": 0.1}}, {}),
    "sampling": ({}, {"rollout": {"sampling": {"temperature": 0.7, "max_new_tokens": 2048}}}),
    "rewards": ({}, {"reward": {"functions": ["math"], "num_workers": 2}}),
    "dropout of adapters": ({"lora": {"rank": 4}}, {"lora": {"rank": 4, "dropout": 0.1, "sync": "merged"}}),
    "the same scale": ({"lora": {"rank": 4}}, {"lora": {"rank": 4, "rank_stabilised": True, "alpha": 16}}),
    "the coefficient of MTP layers": (
        {"trainer": {"mtp_loss_coefficient": 0.1}},
        {"trainer": {"mtp_loss_coefficient": 0.3}},
    ),
    "the critic's rate": (
        {"algorithm": {"preset": "ppo"}},
        {"algorithm": {"preset": "ppo"}, "critic": {"optimizer": {"learning_rate": 1e-6}}},
    ),
}
"""Sections of the recipe when a run began, and after a change that leaves the meaning of the checkpoint's state."""


@pytest.mark.parametrize("kind", [*SAME_COUNTS, *USEFUL_CHANGES])
def test_changes_that_leave_the_meaning_of_the_state_are_made(recipe: Recipe, home: Path, kind: str) -> None:
    before, now = (SAME_COUNTS | USEFUL_CHANGES)[kind]
    _write_checkpoint(home / "step_000008", _change(recipe, before), 8)
    changed = _change(recipe, now)
    with RunFolder(changed, resume=True) as folder:
        assert find_origin(changed, folder, "if-any").checkpoint == home / "step_000008"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """Files of a drafter, of 20 of the policy's 60 tokens."""
    (tmp_path / "policy").mkdir()
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = sizes | {"vocab_size": 60, "max_position_embeddings": 32}
    (tmp_path / "policy/config.json").write_text(json.dumps(config))
    return make_eagle3(tmp_path / "drafter", tmp_path / "policy", draft_vocab_size=20)


def training_drafter(recipe: Recipe, drafter: Path, learning_rate: float | None = 1e-4) -> Recipe:
    values = plain_recipe(recipe)
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    values["rollout"] = {"vllm": {"speculative_config": speculation}}
    values["trainer"] = {"drafter_learning_rate": learning_rate}
    return Recipe.model_validate(values)


def test_a_drafter_that_a_checkpoint_lacks_is_refused(recipe: Recipe, home: Path, drafter: Path) -> None:
    training = training_drafter(recipe, drafter)
    with RunFolder(training, resume=True) as folder, pytest.raises(ConfigError, match="the checkpoint has no drafter"):
        find_origin(training, folder, "if-any")
    _write_checkpoint(home / "step_000008", training, 8)
    with RunFolder(training, resume=True) as folder:
        assert find_origin(training, folder, "if-any").checkpoint == home / "step_000008"
    # Its trained weights would be lost the other way round.
    with RunFolder(recipe, resume=True) as folder, pytest.raises(ConfigError) as caught:
        find_origin(recipe, folder, "if-any")
    assert str(caught.value).startswith("trainer.drafter_learning_rate is left out: the checkpoint has a drafter")
    assert "set trainer.drafter_learning_rate=0.0001, or" in str(caught.value)


def _change_config(drafter: Path) -> None:
    """Let the drafter read other layers, which changes no shape."""
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))


def _change_map(drafter: Path) -> None:
    """Let the drafter's last token stand for the next token of the policy, or the one before."""
    tensors = load_file(drafter / "model.safetensors")
    tensors["d2t"][-1] += 1 if tensors["d2t"][-1] + 19 < 59 else -1
    save_file(tensors, drafter / "model.safetensors")


def _drop_maps(drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    save_file({name: tensors[name] for name in tensors.keys() - {"d2t", "t2d"}}, drafter / "model.safetensors")


CHANGED_DRAFTERS = {
    "config": (_change_config, "this drafter's config.json differ"),
    "map": (_change_map, "this drafter's tensor d2t differ"),
    "no maps": (_drop_maps, "this drafter's tensor d2t and tensor t2d differ"),
}


@pytest.mark.parametrize("change", CHANGED_DRAFTERS)
def test_a_changed_drafter_is_refused_where_it_is_trained(
    recipe: Recipe, home: Path, drafter: Path, tmp_path: Path, change: str
) -> None:
    edit, text = CHANGED_DRAFTERS[change]
    training = training_drafter(recipe, drafter)
    _write_checkpoint(home / "step_000008", training, 8)
    # An export of this run in another dtype continues the same training.
    exported = shutil.copytree(drafter, tmp_path / "exported")
    fields = json.loads((exported / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (exported / "config.json").write_text(json.dumps(fields))
    moved = training_drafter(recipe, exported)
    with RunFolder(moved, resume=True) as folder:
        origin = find_origin(moved, folder, "if-any")
        edit(exported)
        before = contents(home.parent)
        for start in (lambda: find_origin(moved, folder, "if-any"), lambda: begin_from_copy(origin, moved, folder)):
            with pytest.raises(ConfigError) as caught:
                start()
            message = str(caught.value)
            assert message.startswith(f"rollout.vllm.speculative_config.model = {exported}: {text}"), message
            assert "Restore that drafter's files, choose another name=NAME, or start over" in message
        assert contents(home.parent) == before


def test_a_frozen_drafter_may_change(recipe: Recipe, home: Path, drafter: Path) -> None:
    """The distribution of samples is the policy's with any drafter."""
    frozen = training_drafter(recipe, drafter, learning_rate=None)
    _write_checkpoint(home / "step_000008", frozen, 8)
    _change_map(drafter)
    with RunFolder(frozen, resume=True) as folder:
        assert find_origin(frozen, folder, "if-any").checkpoint == home / "step_000008"


def test_a_drafter_of_an_earlier_version_is_not_compared(recipe: Recipe, home: Path, drafter: Path) -> None:
    training = training_drafter(recipe, drafter)
    _write_checkpoint(home / "step_000008", training, 8, without=("drafter",))
    _change_map(drafter)
    with RunFolder(training, resume=True) as folder:
        assert find_origin(training, folder, "if-any").checkpoint == home / "step_000008"


def test_a_model_with_a_text_section_is_the_same_in_another_dtype(recipe: Recipe, tmp_path: Path) -> None:
    """An export writes its dtype into the section, too."""
    config = tmp_path / "model/config.json"

    def identity(**text: object) -> str:
        section = {"hidden_size": 8, "dtype": "float32"} | text
        config.write_text(json.dumps({"model_type": "qwen3_5", "dtype": "float32", "text_config": section}))
        return Inputs.read(recipe).models["model.path"]

    assert identity() == identity(dtype="bfloat16", _name_or_path="there") != identity(hidden_size=16)


def test_a_tokenizer_with_other_ids_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    tokenizer = tmp_path / "model/tokenizer.json"
    contents_before = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    tokenizer.write_text(json.dumps(contents_before))
    with RunFolder(recipe) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", recipe, 2)
    with RunFolder(recipe, resume=True) as folder:
        for changes in ({"model": {"vocab": {"a": 1, "b": 0}}}, {"added_tokens": [{"id": 3, "content": "<end>"}]}):
            tokenizer.write_text(json.dumps(contents_before | changes))
            with pytest.raises(ConfigError, match=rf"model\.path = {tmp_path}/model: its tokenizer\.json has other"):
                find_origin(recipe, folder, "if-any")
        # Another program writes other spaces and further fields.
        tokenizer.write_text(json.dumps(contents_before | {"truncation": None}, indent=2))
        assert find_origin(recipe, folder, "if-any").checkpoint


def test_another_chat_template_is_refused_wherever_it_stands(recipe: Recipe, tmp_path: Path) -> None:
    own, given = tmp_path / "model/tokenizer_config.json", tmp_path / "my.jinja"
    own.write_text('{"chat_template": "{{ messages }}"}')
    given.write_text("{{ messages }}")
    with RunFolder(recipe) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", recipe, 2)
    before = contents(folder.path)
    changed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"chat_template": str(given)})})
    with RunFolder(changed, resume=True) as folder:
        given.write_text("{{ messages }}.")
        with pytest.raises(
            ConfigError,
            match=rf"model\.chat_template = {given}: its text is not .*\(model\.chat_template at that time: left out\)",
        ):
            find_origin(changed, folder, "if-any")
        (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}!")
        with pytest.raises(ConfigError, match=rf"model\.chat_template = left out, that of {tmp_path}/model: its text"):
            find_origin(recipe, folder, "if-any")
        assert contents(folder.path) == before
        given.write_text("{{ messages }}")
        assert find_origin(changed, folder, "if-any").checkpoint


def test_other_records_left_out_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    before = {"data.train": "9 records, aa"}
    with RunFolder(recipe) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", recipe, 2, before)
    was = contents(folder.path)
    with RunFolder(recipe, resume=True) as folder:
        for now in ("8 records, ab", "9 records, ac"):
            with pytest.raises(DataError, match=rf"data\.train: .*kept are {now}; then 9 records, aa\)"):
                find_origin(recipe, folder, "if-any", {"data.train": now})
        assert contents(folder.path) == was
        assert find_origin(recipe, folder, "if-any", before | {"data.ptx": "3 records, ad"}).inputs.record_digests


def test_changed_training_data_is_refused_and_changed_validation_data_told(
    recipe: Recipe, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    was, before = file_record(train)["sha256"], contents(home.parent)
    train.write_text("{}\n{}\n")
    heldout.write_text("{}\n{}\n")
    now = file_record(train)["sha256"]
    with RunFolder(recipe, resume=True) as folder:
        with pytest.raises(DataError, match=rf"{train}: data\.train is not .*sha256 is {now}, it was {was}\. Restore"):
            find_origin(recipe, folder, "if-any")
        assert contents(home.parent) == before
        train.write_text("{}\n")
        find_origin(recipe, folder, "if-any")
    assert f"warning: {heldout}: data.validation.held is not what the run was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        pytest.param({"seed": 3}, "seed = 3: the run began with 0. ", id="seed"),
        pytest.param({"data": {"shuffle": False}}, "data.shuffle = false: the run began with true. ", id="shuffle"),
    ],
)
@pytest.mark.parametrize("loop", ["rl", "sft", "preference"])
def test_another_order_of_the_data_is_refused(recipe: Recipe, loop: str, sections: dict[str, Any], field: str) -> None:
    data = {"train": recipe.data.train, "validation": {}}
    values = {**recipe.model_dump(include={"name", "runs_folder", "model"}, exclude_unset=True), "loop": loop}
    began = Recipe.model_validate({**values, "data": data})
    changed = Recipe.model_validate({**values, **sections, "data": data | sections.get("data", {})})
    with RunFolder(began) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", began, 2)
    before = contents(folder.path)
    with RunFolder(changed, resume=True) as folder:
        with pytest.raises(ConfigError, match=re.escape(field)) as caught:
            find_origin(changed, folder, "if-any")
        assert caught.value.exit_code == 2 and contents(folder.path) == before
        assert find_origin(began, folder, "if-any").checkpoint


def test_another_order_of_a_source_is_refused_and_a_new_source_is_not(recipe: Recipe) -> None:
    values = recipe.model_dump(include={"name", "loop", "runs_folder", "model"}, exclude_unset=True)
    train = {"train": recipe.data.train}

    def mixture(**shuffles: bool) -> Recipe:
        sources = {name: {"data": train | {"shuffle": shuffle}} for name, shuffle in shuffles.items()}
        return Recipe.model_validate({**values, "mixture": sources})

    with RunFolder(began := mixture(a=True, b=False)) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", began, 2)
    with RunFolder(began, resume=True) as folder:
        with pytest.raises(ConfigError, match=r"mixture\.b\.data\.shuffle = true: the run began with false"):
            find_origin(mixture(a=True, b=True), folder, "if-any")
        assert find_origin(mixture(a=True, b=False, c=False), folder, "if-any").checkpoint


LEVELS = BAND | {"by": "level"}
OTHER_CURRICULA: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "shared": (LEVELS, {}, BAND | {"by": "topic"}, {}, "data.curriculum.by = topic: the checkpoint has solve rates"),
    "of a source": ({}, LEVELS, {}, BAND, "data.curriculum.by = null: the checkpoint has solve rates by level"),
    "of a source with the shared band": (
        BAND,
        {"by": "level"},
        BAND,
        {"by": "topic"},
        "mixture.a.data.curriculum.by = topic: the checkpoint has solve rates by level",
    ),
}
"""Curricula of `data` and of source a when a run began, the same when it is resumed, and the error's beginning."""
SAME_CURRICULA: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a source with another band": (LEVELS, {"band": [0.2, 0.8]}, LEVELS, {"band": [0.2, 0.8]}),
    "other bands": (LEVELS, {}, LEVELS, {"band": [0.3, 0.6], "memory": 0.1}),
    "the same value in another place": (LEVELS, {}, LEVELS, {"by": "level"}),
    "no band yet": ({}, {}, LEVELS, {}),
}


def _mixed(recipe: Recipe, shared: dict[str, Any], own: dict[str, Any], *new_sources: str) -> Recipe:
    values = recipe.model_dump(include={"name", "loop", "runs_folder", "model"}, exclude_unset=True)
    train = {"train": recipe.data.train}
    sources: dict[str, Any] = {"a": {"data": train | {"curriculum": own}}, "b": {"data": train}}
    sources |= {name: {"data": train | {"curriculum": BAND | {"by": "kind"}}} for name in new_sources}
    return Recipe.model_validate({**values, "data": train | {"curriculum": shared}, "mixture": sources})


@pytest.mark.parametrize("kind", OTHER_CURRICULA)
def test_solve_rates_of_a_source_by_another_field_are_refused(recipe: Recipe, home: Path, kind: str) -> None:
    shared, own, shared_now, own_now, error = OTHER_CURRICULA[kind]
    _write_checkpoint(home / "step_000008", _mixed(recipe, shared, own), 8)
    changed = _mixed(recipe, shared_now, own_now)
    with RunFolder(changed, resume=True) as folder, pytest.raises(ConfigError) as caught:
        find_origin(changed, folder, "if-any")
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("kind", SAME_CURRICULA)
def test_solve_rates_by_the_same_field_continue_beside_a_new_source(recipe: Recipe, home: Path, kind: str) -> None:
    shared, own, shared_now, own_now = SAME_CURRICULA[kind]
    _write_checkpoint(home / "step_000008", _mixed(recipe, shared, own), 8)
    for changed in (_mixed(recipe, shared_now, own_now), _mixed(recipe, shared_now, own_now, "c")):
        with RunFolder(changed, resume=True) as folder:
            assert find_origin(changed, folder, "if-any").checkpoint == home / "step_000008"


@pytest.mark.parametrize("loop", ["rl", "sft", "preference"])
def test_steps_of_epochs_are_refused_if_they_count_other_records(recipe: Recipe, loop: str) -> None:
    values = {**recipe.model_dump(include={"name", "runs_folder", "model"}, exclude_unset=True), "loop": loop}
    values |= {"data": {"train": recipe.data.train}}

    def with_train(**train: Any) -> Recipe:
        return Recipe.model_validate({**values, "train": train})

    began = with_train(epochs=2, prompts_per_step=4)
    with RunFolder(began) as folder:
        folder.begin()
    _write_checkpoint(folder.checkpoints_folder / "step_000002", began, 2)
    with RunFolder(began, resume=True) as folder:
        with pytest.raises(ConfigError, match=r"^train\.prompts_per_step = 8: the run drew 8 records in its first 2"):
            find_origin(with_train(epochs=2, prompts_per_step=8), folder, "if-any")
        for resumed in (with_train(steps=9, prompts_per_step=8), with_train(epochs=3, prompts_per_step=4)):
            origin = find_origin(resumed, folder, "if-any")
            assert origin.position.step == 2
            assert origin.position.drawn == ({} if loop == "rl" else {"data.train": 8})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unlogged", [1]),
        ("drawn", {"data.train": "7"}),
        ("drawn", {"data.train": -1}),
        ("drawn", {"data.train": True}),
        ("drawn", [3]),
        ("models", {"model.path": 5}),
        ("template", 5),
        ("vocabulary", 5),
        ("spikes", []),
        ("spikes", {"norms": "x", "losses": [], "rollbacks": 0}),
        ("spikes", {"norms": [1.0], "losses": ["1"], "rollbacks": 0}),
        ("spikes", {"norms": [1.0], "losses": [], "rollbacks": -1}),
        ("recipe", {"name": "small", "train": "x"}),
        ("recipe", {"name": "small", "loop": 3}),
        ("recipe", {"name": "small", "train": {"prompts_per_step": "8"}}),
        ("recipe", {"name": "small", "rollout": {"stragglers": 7}}),
    ],
)
def test_a_damaged_field_of_a_checkpoint_is_named(tmp_path: Path, field: str, value: object) -> None:
    driver = {"recipe": {"name": "small", "loop": "rl", "train": {"prompts_per_step": 8}, "rollout": {}}}
    whole = {"drawn": {"data.ptx": 7}, "spikes": {"norms": [0.5], "losses": [], "rollbacks": 1}, "checksum": None}
    (tmp_path / DRIVER).write_text(json.dumps(driver | whole))
    assert read_driver(tmp_path) == driver | whole
    (tmp_path / DRIVER).write_text(json.dumps(driver | whole | {field: value}))
    with pytest.raises(DataError, match=rf"{DRIVER}: the field {field} is missing or damaged"):
        read_driver(tmp_path)


@pytest.mark.parametrize("written", [None, 1, SCHEMA + 1])
def test_a_checkpoint_of_another_schema_is_refused(recipe: Recipe, home: Path, written: int | None) -> None:
    """The first schema did not write its number."""
    newest = home / "step_000004"
    driver = json.loads((newest / DRIVER).read_text())
    assert driver.pop("schema") == SCHEMA
    (newest / DRIVER).write_text(json.dumps(driver if written is None else driver | {"schema": written}))
    (newest / "manifest.json").unlink()
    write_manifest(newest, {path.name: file_record(path) for path in newest.iterdir()}, {"format": "torch_dist"})
    before = contents(home.parent)
    with (
        RunFolder(recipe, resume=True) as folder,
        pytest.raises(
            DataError, match=rf"step_000004: the checkpoint has schema {written or 1}.*reads schema {SCHEMA}\."
        ) as caught,
    ):
        find_origin(recipe, folder, "if-any")
    assert caught.value.exit_code == 65
    assert contents(home.parent) == before


@pytest.fixture
def copied(recipe: Recipe, home: Path, tmp_path: Path) -> Origin:
    """Copies in memory of the state after step 5; `home` has checkpoints of earlier steps."""
    (tmp_path / "model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    driver = tmp_path / "driver"
    driver.mkdir()
    return Origin(driver, Inputs.read(recipe), DataPosition(step=5), copied_step=5)


def test_a_recovery_from_copies_reads_no_checkpoint(recipe: Recipe, home: Path, copied: Origin) -> None:
    """The hashes of a checkpoint of 14B parameters take minutes."""
    opened: list[str] = []
    is_watched = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_watched and event == "open" and str(arguments[0]).startswith(str(home / "step_")):
            opened.append(str(arguments[0]))

    with RunFolder(recipe, resume=True) as folder:
        sys.addaudithook(watch)
        begin_from_copy(copied, recipe, folder)
        assert opened == []
        assert survey_checkpoints(folder.earlier).newest_intact == home / "step_000004" and opened
        is_watched = False
        assert folder.resumed_step == 5
    assert not (home / ".step_000006.partial").exists()


@pytest.mark.parametrize(
    ("file", "error"), [("train.jsonl", DataError), ("model/config.json", ConfigError), ("template", ConfigError)]
)
def test_a_recovery_refuses_what_a_resume_refuses(
    recipe: Recipe, home: Path, copied: Origin, tmp_path: Path, file: str, error: type[Exception]
) -> None:
    changed = {
        "train.jsonl": '{"other": 1}\n',
        "model/config.json": '{"hidden_size": 16}',
        "template": '{"chat_template": "{{ messages }}!"}',
    }
    with RunFolder(recipe, resume=True) as folder:
        (tmp_path / file.replace("template", "model/tokenizer_config.json")).write_text(changed[file])
        before = contents(folder.path)
        with pytest.raises(error):
            begin_from_copy(copied, recipe, folder)
        assert contents(folder.path) == before


def test_must_fails_where_there_is_nothing_to_go_on_from(recipe: Recipe) -> None:
    with RunFolder(recipe, resume=True) as folder:
        with pytest.raises(ConfigError, match=r"--resume=must: .*small has no checkpoint to continue from"):
            find_origin(recipe, folder, "must")
        assert find_origin(recipe, folder, "if-any").checkpoint is None
