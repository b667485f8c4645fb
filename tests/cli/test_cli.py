from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megarl.cli import app
from megarl.tracking.run_record import SCHEMA
from megarl.types import ConfigError
from tests.forked_command import MEGARL

pytestmark = pytest.mark.end_to_end

HEAVY = ("torch", "transformers", "vllm", "megatron", "numpy", "omegaconf", "pydantic")


def megarl(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # A variable may be one that Python or a library reads when it is imported.
    program = MEGARL if env is None else (sys.executable, "-m", "megarl")
    command = [*program, *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "80", **(env or {})}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, env=environment)


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    (tmp_path / "train.jsonl").write_text('{"messages": {"role": "user", "content": "1 + 2"}, "gt_answer": "3"}\n' * 40)
    sections = {
        "name": "small",
        "loop": "rl",
        "runs_folder": str(tmp_path / "runs"),
        "model": {"path": str(tiny_model())},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "cluster": {"ranks_per_node": 4},
        "trainer": {"tp": 2},
        "train": {"prompts_per_step": 10, "samples_per_prompt": 8, "updates_per_step": 2, "steps": 6},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_help_imports_nothing_heavy() -> None:
    # The modules are listed by the interpreter that has just printed the help.
    program = (
        "import sys\nsys.argv = ['megarl', '--help']\nfrom megarl.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=True)
    assert "show-config" in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_comes_at_once() -> None:
    """It takes at most 1.5 times as long as the imports of typer and rich, on any machine."""
    libraries = [sys.executable, "-c", "import typer.rich_utils, rich.console"]
    own = [sys.executable, "-m", "megarl", "--help"]
    # Taken in turn, so that a busy machine slows both.
    pairs = [(_cpu_seconds(libraries), _cpu_seconds(own)) for _ in range(5)]
    least, found = map(min, zip(*pairs, strict=True))
    assert found < 1.5 * least


def _cpu_seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, capture_output=True, check=True, timeout=900)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


OWN_REWARD = """
from megarl.types import Reward


def score(completion_text, answer, *, correct_score):
    return Reward(correct_score, True, completion_text == answer)
"""


def test_the_table_of_metrics_is_printed_and_imports_no_torch() -> None:
    everything = megarl("metrics", "--json")
    assert everything.returncode == 0, everything.stderr
    table = json.loads(everything.stdout)
    assert (
        table["reward/mean"]["unit"] == "score" and table["reward/mean"]["module"] == "megarl.rollout.step.step_metrics"
    )
    one = megarl("metrics", "time/rollout_seconds")
    assert "time/PHASE_seconds" in one.stdout and "reward/mean" not in one.stdout
    assert "reward/NAME/unscored" in megarl("metrics", "unscored").stdout
    unknown = megarl("metrics", "no/such")
    assert unknown.returncode == 2 and "no/such" in unknown.stderr
    program = (
        "import sys\nsys.argv = ['megarl', 'metrics']\nfrom megarl.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('TORCH', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "TORCH False"


def test_a_dry_run_tries_the_rewards(recipe: Path) -> None:
    for name, message in (
        ("no_such_module_anywhere:score", "cannot import no_such_module_anywhere"),
        ("own_rewards:of_other", "parameters that are not known"),
    ):
        (recipe.parent / "own_rewards.py").write_text("def of_other(completion, **kwargs): return 0.0\n")
        done = megarl("train", recipe, f"reward.functions=[{name}]", "--dry-run", cwd=recipe.parent)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_the_sizes_and_starts_nothing(recipe: Path) -> None:
    # A reward of the user's own is found in the current folder.
    (recipe.parent / "own_rewards.py").write_text(OWN_REWARD)
    own = "reward.functions=[own_rewards:score]"
    done = megarl("train", recipe, "rollout.tp=2", own, "--dry-run", cwd=recipe.parent)
    assert done.returncode == 0, done.stderr
    for words in (
        "4 ranks: trainer tp 2 * pp 1 * dp 2, vLLM tp 2 * 2 replicas",
        "train 40",
        "6, 1.50 epochs",
        "80 a step, 40 an update, 20 an update and data-parallel rank",
        "2 a step, 12 in all",
    ):
        assert words in done.stdout
    assert not (recipe.parent / "runs").exists()
    again = megarl("train", recipe, "train.epochs_per_step=3", "cluster.gpu_memory_gib=h200", "--dry-run")
    for words in (
        "80 a step, 40 an update",
        "6 a step (3 passes of 2), 36 in all",
        "trainer.offload = [] by default: rollout leaves ",
    ):
        assert again.stdout.count(words) == 1, again.stderr
    assert "by default" not in done.stdout


def test_a_job_is_checked_before_it_is_submitted(recipe: Path, tmp_path: Path) -> None:
    """On a node that has Slurm's commands and no job, with an sbatch that only notes that it was called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho Submitted >> sbatch.log\necho Submitted\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    nodes = ["cluster.nodes=2", "cluster.ranks_per_node=2"]
    done = megarl("slurm", "submit", recipe, *nodes, "rollout.vllm.block_sise=16", cwd=tmp_path, env=path)
    assert done.returncode == 2 and "did you mean block_size?" in done.stderr
    done = megarl("slurm", "submit", recipe, *nodes, f"data.train={tmp_path / 'absent'}", cwd=tmp_path, env=path)
    assert done.returncode == 65 and "data.train is not there" in done.stderr
    assert not (tmp_path / "sbatch.log").exists()
    done = megarl("slurm", "submit", recipe, *nodes, cwd=tmp_path, env=path)
    assert (done.returncode, done.stdout) == (0, "Submitted\n"), done.stderr
    assert (tmp_path / "sbatch.log").read_text() == "Submitted\n" * 2
    done = megarl("train", recipe, *nodes, "cluster.launcher=slurm", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "2 of 2 ranks, launcher slurm" in done.stdout, done.stderr


def test_plan_needs_nothing_but_a_config(recipe: Path) -> None:
    """A model of 235 billion parameters on 1024 ranks, whose folder holds a config.json and whose data is not there."""
    sizes = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "tie_word_embeddings": False,
    }  # fmt: skip
    folder = recipe.parent / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    world = ["cluster.nodes=128", "cluster.ranks_per_node=8", "trainer.tp=4", "trainer.pp=2", "trainer.ep=8"]
    engines = ["rollout.tp=8", "rollout.vllm.enable_expert_parallel=true"]
    given = [recipe, f"model.path={folder}", "data.train=absent", *world, *engines]
    done = megarl("plan", *given, "--json")
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    reshard = counted["reshard"]
    # 235.09 billion parameters in bfloat16.
    assert counted["model_bytes"] == 470_187_269_120
    assert reshard["ratio_to_lower_bound"] == 1.0
    # Engine and trainer both deal the experts out to eight neighbours: a rank lacks the other stage's half.
    assert reshard["received_bytes"]["other_node"]["max"] < 0.51 * counted["model_bytes"] / 8
    assert reshard["sent_bytes"]["other_node"]["max"] < 1.05 * reshard["received_bytes"]["other_node"]["mean"]
    assert reshard["gathered_bytes"]["other_node"]["mean"] > 7 * reshard["received_bytes"]["other_node"]["mean"]
    assert reshard["staging_bytes"]["max"] <= 256 << 20
    phases = {phase["phase"]: phase for phase in counted["memory"]["phases"]}
    assert {"start", "rollout", "reshard", "train", "save"} <= phases.keys()
    assert sum(map(sum, phases["train"]["kinds"].values())) == sum(
        phases["train"][size] for size in ("device_bytes", "host_bytes")
    )
    assert counted["memory"]["kv_cache"]["tokens"] > 0
    shown = megarl("plan", *given)
    assert "fullest rank of each phase" in shown.stdout and "KV cache of an engine: " in shown.stdout
    assert "1024 ranks: trainer tp 4 * pp 2 * dp 128, ep 8, vLLM tp 8 with expert parallelism" in shown.stdout
    assert "bytes moved / minimum: 1.00" in shown.stdout


def test_a_plan_without_engines_has_no_reshard(recipe: Path) -> None:
    overrides = ["loop=preference", "trainer.tp=1", "cluster.ranks_per_node=1"]
    shown = CliRunner().invoke(app, ["plan", str(recipe), *overrides])
    assert "trainer tp 1 * pp 1 * dp 1; nodes" in shown.output and "vLLM" not in shown.output
    assert "no reshard: loop preference has no engine here" in shown.output and "bytes moved" not in shown.output
    counted = CliRunner().invoke(app, ["plan", str(recipe), *overrides, "--json"])
    assert '"reshard": null' in counted.output and "model_bytes" not in counted.output


def test_plan_refuses_what_does_not_fit(recipe: Path) -> None:
    done = megarl("plan", recipe, "trainer.tp=3", "cluster.ranks_per_node=3")
    assert done.returncode == 2 and "trainer.tp = 3: does not divide the model's" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(["trainer.tpp=2"], 2, "did you mean trainer.tp?", id="unknown key"),
        pytest.param(["trainer.pp=3"], 2, "trainer.pp = 3", id="sizes"),
        pytest.param(["reward.functions=[nope]"], 2, "'nope'", id="reward"),
        pytest.param(["model.path=absent"], 65, "absent: model folder not found", id="model"),
        pytest.param(["data.train=absent.jsonl"], 65, "absent.jsonl: data.train is not there", id="data"),
        pytest.param(["data.answer_field=answer"], 65, "line 1: no field for answer; the record has", id="record"),
    ],
)
def test_an_error_is_one_message_and_its_exit_code(recipe: Path, arguments: list[str], code: int, message: str) -> None:
    done = megarl("train", recipe, *arguments)
    assert done.returncode == code
    assert done.stdout == f"megarl: checking {recipe}, then training\n"
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_numbers_of_attempts_that_are_none_are_refused_at_once(recipe: Path) -> None:
    done = megarl("eval", "absent", recipe, "--k", "1;4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --k 1;4: not a list of whole numbers")


def test_wrong_usage_exits_2() -> None:
    for arguments in (["train"], ["trian"], ["train", "a.yaml", "--wet-run"]):
        assert megarl(*arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "qwen3_8b_sft", "--to", "trainer.tp=2", "--search"],
        ["plan", "qwen3_8b_sft", "--to", "trainer.tp=2", "--most", "3"],
        ["plan", "qwen3_8b_sft", "--to", "trainer.tp=2", "--explain"],
        ["plan", "qwen3_8b_sft", "--search", "--explain"],
        ["samples", "run", "--account", "--step", "3"],
        ["samples", "run", "--account", "--set", "heldout"],
        ["samples", "run", "--account", "--sort", "best"],
        ["watch", "run", "--once", "--interval", "3"],
        ["metrics", "--json", "--markdown"],
        ["data", "check", "train.jsonl", "--chat-template", "plain"],
        ["recipes", "--to", "folder"],
    ],
    ids=" ".join,
)
def test_an_option_that_does_nothing_is_refused(arguments: list[str]) -> None:
    refused = CliRunner().invoke(app, arguments)
    options = [option for option in arguments if option.startswith("--")]
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception).startswith(f"{options[-1]}: does nothing with"), refused.exception


def finished(recipe: Path) -> Path:
    """The folder of the recipe's run, which has finished with another learning rate."""
    run = recipe.parent / "runs/small"
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "done", "step": 6}))
    shown = megarl("show-config", recipe, "optimizer.learning_rate=0.25").stdout
    (run / "config.yaml").write_text(shown)
    return run


def test_a_finished_run_says_so_at_once_and_changes_nothing(recipe: Path) -> None:
    run = finished(recipe)
    before = {path: path.read_bytes() for path in run.iterdir()}
    for arguments in ([recipe, "--resume"], ["--resume", recipe], ["--resume=must", run]):
        # Python lists each import on stderr. Imports decide how long the answer takes, also on a busy machine.
        done = megarl("train", *arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "megarl.config" in imported
        assert not imported & {"torch", "transformers", "vllm", "megatron", "ray"}
        assert done.returncode == 0 and f"{run} is finished (step 6 of 6): nothing is changed" in done.stdout
        assert ("the recipe differs from the finished run: optimizer.learning_rate: 0.25 -> " in done.stdout) == (
            run not in arguments
        )
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_starts_that_do_not_fit_what_the_folder_holds_are_refused(recipe: Path) -> None:
    run = finished(recipe)
    for arguments, message in (
        ([recipe], "already holds a run, which is done at step 6"),
        ([recipe, "--resume=must", "name=smal"], "smal has no checkpoint to continue from"),
        ([recipe, "--resume=never"], "--resume"),
        ([recipe, "--resume", "--restart"], "--resume and --restart: give one of them"),
        ([run], f"megarl train {run} --resume"),
        ([recipe.parent], "is a folder; give the YAML file of a recipe"),
    ):
        done = megarl("train", *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (run.parent / "smal").exists()


def test_a_run_of_an_older_schema_is_refused_before_its_recipe_is_read(recipe: Path) -> None:
    """Fields of its config.yaml may have other names now."""
    run = finished(recipe)
    checkpoint = run / "checkpoints/step_000006"
    checkpoint.mkdir(parents=True)
    (checkpoint / "driver.json").write_text('{"step": 6}')
    (run / "config.yaml").write_text("algorithm: {filter_range: [0.0, 1.0]}\n")
    done = megarl("train", run, "--resume")
    assert done.returncode == 65
    assert f"{checkpoint}: the checkpoint has schema 1" in done.stderr
    assert f"reads schema {SCHEMA}" in done.stderr


def test_show_config_is_a_recipe_again(recipe: Path) -> None:
    shown = megarl("show-config", recipe, "train.steps=7")
    assert shown.returncode == 0
    again = recipe.parent / "again.yaml"
    again.write_text(shown.stdout)
    assert megarl("show-config", again).stdout == shown.stdout
    assert yaml.safe_load(shown.stdout)["train"]["steps"] == 7
    assert "# Pipeline-parallel size" in shown.stdout


@pytest.mark.parametrize(
    ("raised", "code", "traceback"),
    [
        pytest.param("RuntimeError('boom')", 70, True, id="unforeseen"),
        pytest.param("PeerLostError('rank 3 died')", 76, False, id="foreseen"),
        pytest.param("KeyboardInterrupt()", 130, False, id="interrupted"),
    ],
)
def test_the_exit_code_tells_what_ended_a_command(raised: str, code: int, traceback: bool) -> None:
    program = (
        "import sys\nfrom megarl.cli import app, main\nfrom megarl.types import PeerLostError\n"
        f"@app.command()\ndef fail():\n    raise {raised}\n"
        "sys.argv = ['megarl', 'fail']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert done.returncode == code, json.dumps(done.stderr)
    assert ("Traceback" in done.stderr) == traceback


FAILING = """
import sys, warnings
from megarl.cli import app, main
from megarl.types import DataError, MegarlError, PeerLostError

@app.command()
def fail():
    warnings.warn("of a library", FutureWarning)
    error = {error}
    error.add_note("Traceback: of rank 1")
    raise error

main(["fail"])
"""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("PeerLostError('rank 1 died')", 76, "Traceback: of rank 1\nerror: rank 1 died\n"),
        ("MegarlError('rank 1 raised')", 70, "Traceback: of rank 1\nerror: rank 1 raised\n"),
        ("DataError('a faulty line')", 65, "error: a faulty line\n"),
    ],
)
def test_the_first_cause_is_said_last_and_libraries_warnings_not_at_all(error: str, code: int, message: str) -> None:
    program = FAILING.format(error=error)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize(("before", "code"), [("pass", 65), ("print('a table', flush=True)", 74)])
def test_the_exit_code_is_true_although_the_output_has_no_room(before: str, code: int) -> None:
    program = FAILING.format(error="DataError('a faulty line')").replace(
        "    warnings.warn", f"    {before}\n    warnings.warn"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=60)
    assert done.returncode == code


def test_the_version() -> None:
    done = megarl("--version")
    assert done.returncode == 0 and done.stdout.startswith("megarl 0.")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (81_920, "81.9 KB"), (2e6, "2.0 MB"), (470_187_269_120, "470.2 GB")],
)
def test_sizes_have_a_fitting_unit(size: float, text: str) -> None:
    from megarl.console.lines import size_text

    assert size_text(size) == text
    assert size_text(-size or 1, "+").startswith("-" if size else "+")


def test_the_model_of_a_run_is_the_one_that_its_recipe_names(recipe: Path) -> None:
    from megarl.cli.convert import _find_model_of_run

    checkpoint = recipe.parent / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    assert _find_model_of_run(checkpoint) is None
    (recipe.parent / "run/config.yaml").write_text(recipe.read_text())
    expected = Path(yaml.safe_load(recipe.read_text())["model"]["path"])
    assert _find_model_of_run(checkpoint) == _find_model_of_run(checkpoint.parent) == (expected, {})


def test_plan_on_a_missing_folder_says_how_to_get_it(recipe: Path) -> None:
    done = megarl("plan", recipe, "model.path=models/Qwen2.5-7B")
    assert done.returncode == 65
    assert "hf download Qwen/Qwen2.5-7B config.json --local-dir models/Qwen2.5-7B" in done.stderr
