"""The Python API: a run, its tables, a plan, an evaluation and the errors of all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import megarl
from megarl.api import _make_column, _make_error
from megarl.files.import_path import import_object, source_being_imported
from megarl.platform.commands import follow_command, run_in_foreground
from megarl.types import ConfigError, MegarlError, StoppedError

ROOT = Path(__file__).resolve().parents[1]
REWARD = """
import json, sys
import megarl
from megarl.types import Reward

def longer(completion_text: str) -> Reward:
    return Reward(score=float(len(completion_text)), format_valid=True, answer_correct=True)

if __name__ == "__main__":
    recipe, overrides = json.loads(sys.argv[1])
    run = megarl.train(recipe, {**overrides, "reward.functions": [longer]})
    steps = run.metrics().to_pylist()
    samples = run.samples(1)
    print("FOUND", json.dumps([run.state, len(steps), steps[-1]["train/grad_norm"], samples.num_rows, str(run.model)]))
"""


def recipe_of(model: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    data = folder / "sums.jsonl"
    sums = [{"messages": [{"role": "user", "content": f"{n} + 1 ="}], "gt_answer": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(one) + "\n" for one in sums))
    overrides = {
        "model.path": str(model), "data.train": str(data), "data.validation.heldout": str(data),
        "runs_folder": str(folder / "runs"), "cluster.ranks_per_node": 1, "train.steps": 2,
        "train.prompts_per_step": 2, "train.samples_per_prompt": 2, "rollout.sampling.max_new_tokens": 4,
        "optimizer.warmup_steps": 0,
    }  # fmt: skip
    return str(ROOT / "launch/recipes/tiny_rl.yaml"), overrides


@pytest.mark.end_to_end
def test_a_script_trains_with_its_own_reward_and_reads_the_run(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    recipe, overrides = recipe_of(tiny_model(), tmp_path)
    script = tmp_path / "script.py"
    script.write_text(REWARD)
    command = [sys.executable, str(script), json.dumps([recipe, overrides])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    state, num_rows, norm, num_samples, model = json.loads(line.removeprefix("FOUND"))
    assert (state, num_rows, num_samples) == ("done", 3, 4) and norm > 0
    run = megarl.load_run(tmp_path / "runs/tiny_rl")
    assert run.model == Path(model) and run.recipe["reward.functions"] == [f"{script}:longer"]
    assert run.samples().num_rows >= num_samples and "step" in run.samples().column_names
    with pytest.raises(ConfigError, match=r"step = 7: .* has no samples of this step; it has steps"):
        run.samples(7)
    found = megarl.evaluate(run, recipe, overrides, n=1, out=tmp_path / "evaluation")
    assert 0 <= found["sets"]["heldout"]["measures"]["accuracy"]["value"] <= 1


@pytest.mark.end_to_end
def test_a_plan_is_that_of_the_command(tmp_path: Path) -> None:
    recipe = ROOT / "launch/recipes/qwen3_14b_dapo_h200.yaml"
    assert megarl.plan(recipe)["fits"] is True
    assert megarl.plan(recipe, {"cluster.gpu_memory_gib": "h100"})["fits"] is False
    with pytest.raises(ConfigError, match=r"trainer\.tq"):
        megarl.plan(recipe, {"trainer.tq": 4})


def test_other_folders_and_functions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        megarl.load_run(tmp_path)
    with pytest.raises(ConfigError, match="other processes cannot import it"):
        megarl.train("recipe.yaml", {"reward.functions": [lambda completion_text: 1.0]})
    with pytest.raises(AttributeError):
        megarl.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_script_without_a_main_guard_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import megarl\ndef reward(completion_text):\n    return 1.0\nmegarl.train('recipe.yaml')\n")
    with pytest.raises(ConfigError, match=r'script\.py calls megarl .* `if __name__ == "__main__":`'):
        import_object(f"{script}:reward", "reward.functions")
    assert source_being_imported() is None


def test_the_package_shows_what_it_offers() -> None:
    assert {"train", "plan", "evaluate", "load_run", "Run", "ConfigError", "__version__"} <= set(dir(megarl))
    assert megarl.ConfigError is ConfigError and megarl.__version__ == version("megarl")


def test_a_type_checker_resolves_an_editable_install() -> None:
    """pyright reads `.pth` files but runs no import hooks, so the repository's folder must stand in one as text."""
    path_files = list(Path(sysconfig.get_path("purelib")).glob("__editable__*megarl*.pth"))
    if not path_files:
        pytest.skip("megarl is not installed from its repository in editable mode")
    [path_file] = path_files
    assert Path(path_file.read_text().strip()).resolve() == ROOT


def test_exit_codes_become_errors() -> None:
    stopped = _make_error(StoppedError.exit_code, "warning\nerror: the run was stopped\n")
    assert type(stopped) is StoppedError and str(stopped) == "the run was stopped"
    assert type(_make_error(9, "")) is MegarlError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, 2.5], [1.0, None, 2.5]),
        ([1, None], [1, None]),
        (["a", None], ["a", None]),
        ([{"a": 1}, None, "b"], ['{"a": 1}', None, '"b"']),
        ([True, False], [True, False]),
    ],
)
def test_columns_have_one_type(values: list[Any], expected: list[Any]) -> None:
    assert _make_column(values).to_pylist() == expected


def test_a_followed_command_shows_its_errors(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out'); print('bad', file=sys.stderr); sys.exit(3)"
    assert follow_command([sys.executable, "-c", program], captures_output=True) == (3, "out\n", "bad\n")
    assert capfd.readouterr().err == "bad\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_in_the_foreground_gets_the_signals_of_its_caller(number: signal.Signals) -> None:
    """The caller is a process of its own, which gets the signal while its program sleeps."""
    # It catches the signal: under nohup it would inherit that SIGHUP is ignored.
    program = f"import signal, time; signal.signal({number:d}, lambda *_: exit(5)); print('started', flush=True); "
    program += "time.sleep(60)"
    caller = (
        "import sys; from megarl.platform.commands import run_in_foreground;"
        f"print('code', run_in_foreground([sys.executable, '-c', {program!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.stdout.read() == "code 5\n"


def test_a_signal_before_the_program_has_started_is_passed_to_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_late(command: list[str]) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGTERM)
        return start(command)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    assert run_in_foreground([sys.executable, "-c", "import time; time.sleep(60)"]) == 128 + signal.SIGTERM
