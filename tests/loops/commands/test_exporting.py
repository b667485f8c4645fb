"""`megarl export` and `megarl fork` on a run folder with real checkpoints, without ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from megarl.checkpoint.convert import to_megatron
from megarl.cli import main
from megarl.loops.commands.exporting import export
from megarl.loops.commands.forking import make_fork
from megarl.tracking.run_record import SCHEMA, RunRecord
from megarl.types import ConfigError, DataError


@pytest.fixture
def run(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 4 steps with the checkpoints of steps 2 and 4, in the current folder."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "base"
    shutil.copytree(tiny_model(), model)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# The base model\n")
    made = tmp_path / "runs/sums"
    for step in (2, 4):
        to_megatron(model, tmp_path / "made", tp=2)
        home = made / f"checkpoints/step_{step:06d}"
        home.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made/release").rename(home)
        shutil.rmtree(tmp_path / "made")
        (home / "driver.json").write_text(json.dumps({"schema": SCHEMA, "step": step}))
    recipe = {
        "name": "sums", "loop": "sft", "model": {"path": str(model), "override_config": {"rope_theta": 400.0}},
        "data": {"train": "train.jsonl"}, "train": {"steps": 4}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    (made / "config.yaml").write_text(yaml.safe_dump(recipe))
    (made / "status.json").write_text('{"state": "interrupted", "step": 4}')
    (made / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "train/loss": {5 - step}}}\n' for step in range(5)))
    (made / "logs/attempt_1").mkdir(parents=True)
    written_by(made, "0.1.0")
    return made


def written_by(run: Path, version: str) -> None:
    (run / "logs/attempt_1/attempt.json").write_text(json.dumps({"versions": {"megarl": version}}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkpoint_becomes_a_model_folder_with_a_card(run: Path, tmp_path: Path) -> None:
    done = export(run, step=2)
    assert (done.folder, done.step) == (run / "hf_step_000002", 2)
    weights, base = (load_file(folder / "model.safetensors") for folder in (done.folder, tmp_path / "base"))
    assert weights.keys() == base.keys() and all(weights[name].equal(base[name]) for name in base)
    assert json.loads((done.folder / "config.json").read_text())["rope_parameters"]["rope_theta"] == 400.0
    card = ModelCard.load(done.folder / "README.md")
    assert card.data.to_dict()["license"] == "mit" and "# The base model" not in card.text
    assert "trained for 2 steps by supervised fine-tuning" in card.text
    # The second call finds the folder and leaves its weights alone.
    before = (done.folder / "model.safetensors").stat().st_mtime_ns
    assert export(run, step=2).conversion is None
    assert (done.folder / "model.safetensors").stat().st_mtime_ns == before
    other = export(run, step=4, out=tmp_path / "elsewhere")
    assert other.folder == tmp_path / "elsewhere" and (other.folder / "README.md").is_file()


def test_the_exported_model_of_a_finished_run_gets_a_new_card(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no exported model \(hf\); export a checkpoint .* the steps 2, 4"):
        export(run)
    export(run, step=4, out=run / "hf")
    (run / "hf/README.md").unlink()
    # hf/ may be of the run's earlier end.
    with pytest.raises(ConfigError, match="is interrupted, and it went on after it exported hf/; resume it"):
        export(run)
    (run / "status.json").unlink()
    with pytest.raises(ConfigError, match="the run is unknown, and it went on"):
        export(run)
    (run / "status.json").write_text('{"state": "done", "step": 4}')
    assert export(run).step == 4 and (run / "hf/README.md").is_file()
    with pytest.raises(ConfigError, match=r"has no model of a best evaluation \(hf_best\)"):
        export(run, is_best=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"lora": {"rank": 4}}, r"lora\.rank = 4: checkpoints have only the adapters", id="adapters"),
        pytest.param({"loop": "reward_model"}, "loop = reward_model: .*cannot be converted", id="reward model"),
    ],
)
def test_a_checkpoint_without_the_whole_model_is_refused(run: Path, changes: dict[str, object], message: str) -> None:
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**recipe, **changes}))
    before = contents(run)
    with pytest.raises(ConfigError, match=message):
        export(run, step=2)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(["export", "runs/sums", "--step", "3"], 2,
                     "--step 3: runs/sums has no checkpoint of this step; it has the steps 2, 4", id="step"),
        pytest.param(["export", "runs/sums", "--step", "2", "--push-to-hub", "me/sums"], 2,
                     "--push-to-hub me/sums: there is no token for the Hub; set HF_TOKEN", id="no token"),
        pytest.param(["export", "runs/sums", "--step", "2", "--push-to-hub", "sums"], 2,
                     "--push-to-hub sums: not a name on the Hub; write OWNER/NAME", id="name"),
        pytest.param(["export", "runs/sums", "--step", "2", "--best"], 2, "--step and --best: give one", id="both"),
        pytest.param(["export", "runs/sums", "--out", "x"], 2, "--out x: works with --step only", id="out"),
        pytest.param(["export", "runs/sums", "--private"], 2, "--private: has an effect with", id="private"),
        pytest.param(["export", "runs"], 2, "runs: this is not a run folder", id="no run"),
        pytest.param(["fork", "runs/sums", "--step", "3"], 2, "it has the steps 2, 4", id="fork step"),
        pytest.param(["fork", "runs/sums", "--step", "4"], 2, "train.steps = 4: the checkpoint is of step 4, so no "
                     "step is left; raise it with --set train.steps=5", id="no steps left"),
        pytest.param(["fork", "runs/sums", "--step", "2", "--set", "name=sums"], 2, "name = sums: {folder}/runs/sums "
                     "exists already; choose another with --set name=NAME", id="name taken"),
        pytest.param(["fork", "runs/sums", "--step", "2", "optimizer.rate=1"], 2, "optimizer.rate", id="override"),
        # Refused by the start's checks: the data are missing.
        pytest.param(["fork", "runs/sums", "--step", "2"], 65, "train.jsonl: data.train is not there", id="start"),
    ],
)  # fmt: skip
def test_a_wrong_command_gets_one_message_and_changes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = " ".join(capsys.readouterr().err.split())
    assert end.value.code == code and error.count("error: ") == 1, error
    assert message.format(folder=tmp_path) in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [["train", "runs/sums", "--resume"], ["train", "runs/sums/config.yaml", "--resume"],
     ["eval", "runs/sums", "runs/sums"],
     ["export", "runs/sums", "--step", "2"], ["fork", "runs/sums", "--step", "2"],
     ["convert", "to-hf", "--megatron", "runs/sums", "--out", "x"]],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_a_run_of_a_newer_megarl_is_refused_with_both_versions(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    written_by(run, "7.1.0")
    if arguments[1] == "runs/sums":
        # A newer version's field would be reported as an unknown key.
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + "hologram: {rank: 3}\n")
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 65 and error.count("error: ") == 1, error
    assert "was written by megarl 7.1.0, but this is megarl 0.1.0" in error and "Install megarl 7.1.0" in error
    assert contents(tmp_path) == before


def test_a_fork_has_the_checkpoint_the_changed_recipe_and_its_parent(run: Path) -> None:
    (run / "metrics.jsonl").open("a").write('{"step": 5')
    made = make_fork(run, 2, ["train.steps=6", "optimizer.learning_rate=2e-6"])
    assert made == run.with_name("sums_fork_2")
    assert [path.name for path in (made / "checkpoints").iterdir()] == ["step_000002"]
    copied, original = made / "checkpoints/step_000002", run / "checkpoints/step_000002"
    assert {p.name: p.stat().st_ino for p in copied.iterdir()} == {p.name: p.stat().st_ino for p in original.iterdir()}
    recipe = yaml.safe_load((made / "config.yaml").read_text())
    assert (recipe["name"], recipe["train"]["steps"], recipe["optimizer"]["learning_rate"]) == ("sums_fork_2", 6, 2e-6)
    assert RunRecord.open(made).origin == f"sums at step 2 ({run})" and RunRecord.open(run).origin == ""
    assert make_fork(run, 4, ["name=other", "train.steps=6"]) == run.with_name("other")


def test_a_damaged_checkpoint_is_not_forked(run: Path) -> None:
    checkpoint = run / "checkpoints/step_000002"
    manifest = {"files": {"driver.json": {"size": 999, "sha256": ""}}, "versions": {}, "layout": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"driver\.json: .* bytes where manifest\.json says 999"):
        make_fork(run, 2)
    assert not run.with_name("sums_fork_2").exists()
