"""`megarl train --resume`: a run that is killed again and again ends, bit for bit, as one that was left alone.

It is killed as often as `--kills` says.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megarl.processes.process_tree import descendants
from megarl.rollout.state import TIMES
from megarl.tracking.draws import account
from tests.child_processes import driver_process, is_alive, rank_processes
from tests.forked_command import MEGARL
from tests.leftovers import Process, mapped_memory
from tests.logged_steps import logged_steps
from tools.make_dataset import make_dataset
from tools.runs import run_megarl

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(7200)]

STEPS, EVERY = 12, 2

RECIPE = """
name: whole
loop: rl
model: {{path: {model}, dtype: float32, override_config: {{rope_theta: 400.0}}}}
data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl, again: data/heldout.jsonl}},
  max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3, schedule: cosine, warmup_steps: 3, weight_decay: 0.1}}
rollout: {{tp: 2, kv_cache_gib: 0.02,
  sampling: {{max_new_tokens: 12, temperature: 1.6, temperature_schedule: cosine, end_temperature: 0.7}}}}
reward: {{functions: ["letters:share_of_digits"]}}
algorithm: {{dynamic_sampling: [0.0, 1.0], oversampling: 1.5, kl_coefficient: 0.05, kl_target: 0.01, kl_horizon: 100,
  entropy_top_share: 0.4, reference_update_steps: 3, reference_mixing: 0.5}}
train: {{steps: {steps}, prompts_per_step: 4, samples_per_prompt: 4}}
evaluation: {{max_problems: 4, every_steps: 5, sampling: {{max_new_tokens: 64}}}}
checkpoint: {{every_steps: {every}, keep: 3}}
"""

# A model with random weights answers no question, but can learn to write digits. What counts as right is as good as
# drawn by lot, so that some groups are left out and others wait. An evaluation lasts as long as a file says.
REWARD = """
import time
from pathlib import Path

from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    while answer.startswith("held out") and Path("hold").exists():
        Path("held").touch()
        time.sleep(0.01)
    share = sum(c.isdigit() for c in completion_text) / max(1, len(completion_text))
    return Reward(share, True, len(completion_text) % 2 == 0)
"""


@dataclass(frozen=True)
class Runs:
    """A folder with a recipe and the undisturbed run `whole`."""

    folder: Path

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*MEGARL, "train", *arguments],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, *arguments: str, **environment: str) -> str:
        driver = self.start(*arguments, **environment)
        output, _ = driver.communicate(timeout=1500)
        assert driver.returncode == 0, output
        return output

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def status(self, name: str) -> dict[str, Any]:
        return json.loads((self.run(name) / "status.json").read_text())

    def checkpoints(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.run(name) / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("resume"))
    make_dataset(runs.folder / "data", sft=8, train=64, heldout=8)
    heldout = runs.folder / "data/heldout.jsonl"
    problems = [json.loads(line) for line in heldout.read_text().splitlines()]
    heldout.write_text("".join(json.dumps({**p, "gt_answer": f"held out {p['gt_answer']}"}) + "\n" for p in problems))
    (runs.folder / "letters.py").write_text(REWARD)
    model = tiny_model(num_layers=2)
    (runs.folder / "recipe.yaml").write_text(RECIPE.format(model=model, steps=STEPS, every=EVERY))
    runs.train("recipe.yaml")
    return runs


@pytest.mark.long
def test_groups_that_waited_are_trained_from_the_log_probs_of_the_weights_that_sampled_them(runs: Runs) -> None:
    steps = logged_steps(runs.run("whole"))[1:]
    waited = [step for step in steps if step["staleness/max"] > 0]
    assert waited and len(waited) < STEPS and all(step["staleness/mean"] <= step["staleness/max"] for step in steps)
    # One update a step: the ratio is 1 where all is fresh, and elsewhere is not.
    assert {step["train/ratio"] for step in steps if step not in waited} == {1.0}
    assert all(step["train/ratio"] != 1.0 for step in waited)
    assert [step["step"] for step in steps if step["kl/reference_moved"]] == [3, 6, 9, 12]
    assert all(0.4 <= step["entropy/trained_share"] < 0.6 and step["entropy/threshold"] > 0 for step in steps)
    # At the temperature that each was sampled at, which moves meanwhile.
    assert all(step["logprob_gap/max"] <= 1e-5 and step["logprob_gap/measured"] == 1 for step in steps)
    temperatures = [step["rollout/temperature"] for step in steps]
    # In a step whose groups had all waited it is theirs.
    # Up to the rounding of a mean.
    assert temperatures[0] == pytest.approx(1.6) and 0.7 - 1e-9 <= temperatures[-1] < 0.75
    assert all(later <= before + 1e-9 for before, later in pairwise(temperatures))
    assert len({round(temperature, 9) for temperature in temperatures}) > 6


def test_the_exported_model_states_what_the_recipe_changes(runs: Runs) -> None:
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(runs.run("whole") / "hf").rope_parameters["rope_theta"] == 400.0


def test_a_run_that_is_killed_again_and_again_ends_bit_equal(runs: Runs, num_kills: int) -> None:
    moments = random.Random(7)
    name = "killed"
    temporary = runs.folder / "tmp"
    temporary.mkdir()
    for number in range(num_kills):
        driver = runs.start("recipe.yaml", f"name={name}", "--resume", TMPDIR=str(temporary))
        victim = moments.choice(["driver", "rank 0", "rank 1"])
        during_save = number % 3 == 1
        last = 1 + number * STEPS // num_kills
        try:
            await_moment(runs, name, driver, last, during_save)
            time.sleep(moments.uniform(0, 0.05 if during_save else 1.0))
            saved = runs.checkpoints(name)
            pids = rank_processes(driver.pid) | {-1: driver_process(driver.pid)}
            started, memory = started_processes(driver.pid)
            os.kill(pids[{"driver": -1, "rank 0": 0, "rank 1": 1}[victim]], signal.SIGKILL)
            output, _ = driver.communicate(timeout=1200)
        finally:
            driver.kill()
        assert driver.returncode in (-signal.SIGKILL, 76), output
        await_no_leftovers(started, memory)
        # A killed driver cannot remove its private folder; the next start does.
        assert all(path.name.startswith("megarl-run-") for path in temporary.iterdir())
        print(f"kill {number + 1}: {victim} at step {runs.status(name)['step']}, saved {saved}, {during_save=}")
    newest = runs.run(name) / "checkpoints" / runs.checkpoints(name)[-1]
    flip_a_bit(newest / "__0_0.distcp")
    earlier = runs.checkpoints(name)[-2]
    output = runs.train(f"runs/{name}", "--resume", TMPDIR=str(temporary))
    assert list(temporary.iterdir()) == []
    assert f"checkpoint {newest.name} is left out" in output and "__0_0.distcp: its sha256 is" in output
    assert f"resuming from runs/{name}/checkpoints/{earlier}" in output.replace(f"{runs.folder}/", "")
    resumed_step = int(earlier[5:])
    done = {"state": "done", "step": STEPS, "cause": None, "exit_code": 0}
    whole, resumed = runs.status("whole"), runs.status(name)
    # The tiny policy is cut at its length limit, which breaks the same rules in both runs.
    broken = [{finding["rule"] for finding in status.pop("health")} for status in (whole, resumed)]
    assert broken[0] == broken[1] and "truncated" in broken[0]
    assert whole == done
    # How often it was taken up again without a step gained is for the kills to say.
    assert resumed | {"restarts": 0} == done | {"resumed_step": resumed_step, "restarts": 0}
    assert_bit_equal(runs.run(name), runs.run("whole"))
    assert_each_prompt_is_accounted_for(runs.run(name), runs.run("whole"))


def assert_each_prompt_is_accounted_for(mine: Path, other: Path) -> None:
    """Each prompt of an epoch was drawn once, and the same prompts were trained on as in the other run."""
    killed, calm = account(mine), account(other)
    assert killed.faults == [] and killed.epochs == calm.epochs
    assert sum(epoch.endings["used"] for epoch in killed.epochs) == 4 * STEPS
    assert all(max(epoch.draws.values()) == 1 for epoch in killed.epochs)
    assert sum(epoch.endings["filtered"] for epoch in killed.epochs) > 0
    shown = run_megarl("samples", mine, "--account")
    assert shown.returncode == 0 and "filtered: dropped by algorithm.dynamic_sampling" in shown.stdout, shown


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_equal(runs: Runs) -> None:
    moments, name, seen = random.Random(11), "asked", []
    for number, asked in enumerate((signal.SIGUSR1, signal.SIGTERM)):
        driver = runs.start("recipe.yaml", f"name={name}", "--resume")
        try:
            await_moment(runs, name, driver, 3 + 4 * number, False)
            time.sleep(moments.uniform(0, 0.7))
            driver.send_signal(asked)
            output, _ = driver.communicate(timeout=1200)
        finally:
            driver.kill()
        assert driver.returncode == 75, output
        status = runs.status(name)
        saved = f"{asked.name}: saved after step {status['step']} of {STEPS}; go on with: megarl train"
        assert (status["state"], status["exit_code"]) == ("stopped", 75) and saved in status["cause"]
        assert runs.checkpoints(name)[-1] == f"step_{status['step']:06d}"
        seen.append(status["step"])
    assert 3 <= seen[0] < seen[1] < STEPS
    runs.train(f"runs/{name}", "--resume")
    assert_bit_equal(runs.run(name), runs.run("whole"))


@pytest.mark.long
def test_an_evaluation_that_a_signal_cuts_short_is_made_up_for(runs: Runs) -> None:
    name, step = "cut", 5
    hold, held = runs.folder / "hold", runs.folder / "held"
    driver = runs.start("recipe.yaml", f"name={name}")
    try:
        await_moment(runs, name, driver, 1, False)
        hold.touch()
        while not held.exists():
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.01)
        driver.send_signal(signal.SIGUSR1)
        output, _ = driver.communicate(timeout=600)
    finally:
        driver.kill()
        hold.unlink(missing_ok=True)
    assert driver.returncode == 75 and runs.status(name)["step"] == step, output
    newest = runs.run(name) / "checkpoints" / runs.checkpoints(name)[-1]
    logged = logged_steps(runs.run(name))
    # The step was logged before its evaluation.
    assert newest.name == f"step_{step:06d}" and [row["step"] for row in logged] == list(range(step + 1))
    assert logged[-1]["evaluation_follows"] and "train/loss" in logged[-1]
    runs.train(f"runs/{name}", "--resume")
    assert_bit_equal(runs.run(name), runs.run("whole"))


def test_a_second_signal_ends_a_run_at_once(runs: Runs) -> None:
    driver = runs.start("recipe.yaml", "name=urgent")
    try:
        await_moment(runs, "urgent", driver, 1, False)
        # A rank that hangs must not delay the end. It also holds the save, which could end before the second signal.
        os.kill(next(iter(rank_processes(driver.pid).values())), signal.SIGSTOP)
        driver.send_signal(signal.SIGUSR1)
        while driver.poll() is None and "SIGUSR1: saving" not in (driver.stdout.readline() if driver.stdout else ""):
            pass
        driver.send_signal(signal.SIGINT)  # a SIGUSR1 this soon would count as the same request
        output, _ = driver.communicate(timeout=120)
    finally:
        driver.kill()
    status = runs.status("urgent")
    assert not rank_processes(driver.pid), output
    assert (driver.returncode, status["state"]) == (130, "interrupted"), output
    assert "SIGUSR1, then a second signal: the run exited at once" in status["cause"]


def started_processes(command: int) -> tuple[set[int], set[str]]:
    """Return the processes that a command has started, and the names of the shared memory that they map."""
    started = {command, driver_process(command), *rank_processes(command).values()}
    started |= {process for above in list(started) for process in descendants(above)}
    assert len(started) > 4, "driver and ranks, but no reward process"
    return started, mapped_memory([Process(pid, "") for pid in started])


def await_no_leftovers(started: set[int], memory: set[str]) -> None:
    """Wait until processes have ended and their shared memory is gone; fail after two minutes."""
    ending = time.monotonic() + 120
    while left := [pid for pid in started if is_alive(pid)] + [
        name for name in memory if Path("/dev/shm", name).exists()
    ]:
        assert time.monotonic() < ending, left
        time.sleep(0.01)


def await_moment(runs: Runs, name: str, driver: subprocess.Popen[str], last: int, during_save: bool) -> None:
    """Wait until this process has logged step `last` or later; with `during_save`, then until a save is under way."""
    home, started = runs.run(name), time.monotonic()

    def reached() -> bool:
        try:
            status = runs.status(name)
            # A new owner replaces the file of the one before.
            owners = [path.read_text() for path in (home / "owners").iterdir()]
        except FileNotFoundError:
            return False
        own = f'"pid": {driver_process(driver.pid)},'
        return any(own in owner for owner in owners) and status["state"] == "running" and status["step"] >= last

    def wait_until(is_so: Callable[[], object], seconds: float) -> None:
        while not is_so():
            assert time.monotonic() < started + 1200 and driver.poll() is None, driver.communicate()
            time.sleep(seconds)

    # A look at all processes takes 10 ms of a core.
    wait_until(reached, 0.1)
    if during_save:
        wait_until(lambda: any((home / "checkpoints").glob(".step_*.partial")), 0.01)


def assert_bit_equal(mine: Path, other: Path) -> None:
    """Weights, optimizer state, random numbers, metrics but for times, samples, curves."""
    assert (mine / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()
    last = f"checkpoints/step_{STEPS:06d}/manifest.json"
    files = [json.loads((run / last).read_text())["files"] for run in (mine, other)]
    assert len([name for name in files[0] if name.endswith(".distcp")]) == 2
    for name in files[0].keys() - {"driver.json", ".metadata", TIMES}:  # These name the run and the moment.
        assert files[0][name] == files[1][name], name
    assert (mine / "checkpoints/latest").read_text() == f"step_{STEPS:06d}\n"
    steps = [[*map(untimed, logged_steps(run))] for run in (mine, other)]
    assert steps[0] == steps[1] and [step["step"] for step in steps[0]] == list(range(STEPS + 1))
    assert len({step["train/loss"] for step in steps[0][1:]}) == STEPS, "nothing was trained"
    samples = [{path.name: path.read_bytes() for path in (run / "samples").iterdir()} for run in (mine, other)]
    assert samples[0] == samples[1]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(mine / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert curve == [(step["step"], pytest.approx(step["reward/mean"])) for step in steps[0][1:]]


def untimed(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if not name.startswith(("time/", "perf/", "memory/", "plan/"))}


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


class Crafted:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def cut_short(newest: Path) -> str:
    file = newest / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    return f"{file}: .* bytes where manifest.json says"


def lose(newest: Path) -> str:
    (newest / "__0_0.distcp").unlink()
    return f"{newest / '__0_0.distcp'}: not found"


def damage(newest: Path) -> str:
    flip_a_bit(newest / "__1_0.distcp")
    return f"{newest / '__1_0.distcp'}: its sha256 is"


def forget_manifest(newest: Path) -> str:
    (newest / "manifest.json").unlink()
    return f"{newest / 'manifest.json'}: not found"


def craft(newest: Path, name: str) -> str:
    """A pickle that does something, and a manifest that says it should be there."""
    import torch

    file, trap = newest / name, Crafted(newest.parent / "sprung")
    if name.endswith(".pt"):
        torch.save({"layout": trap}, file)
    elif name.endswith(".distcp"):
        found = pickle.loads((newest / ".metadata").read_bytes()).storage_data
        place = next(p for at, p in found.items() if at.fqn.startswith("random/") and p.relative_path == name)
        content = bytearray(file.read_bytes())
        crafted = pickle.dumps(trap)
        content[place.offset : place.offset + len(crafted)] = crafted
        file.write_bytes(content)
    else:
        file.write_bytes(pickle.dumps(trap))
    manifest = json.loads((newest / "manifest.json").read_text())
    from megarl.checkpoint.manifest import file_record

    manifest["files"][name] = file_record(file)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    return f"{file}: cannot be read"


FAULTS = [
    pytest.param(cut_short, id="cut short"),
    pytest.param(lose, id="lost"),
    pytest.param(damage, id="bit flipped"),
    pytest.param(forget_manifest, id="no manifest"),
    pytest.param(lambda newest: craft(newest, ".metadata"), id="crafted .metadata"),
    pytest.param(lambda newest: craft(newest, "common.pt"), id="crafted common.pt"),
    pytest.param(lambda newest: craft(newest, "__0_0.distcp"), id="crafted object"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    runs: Runs, tmp_path: Path, fault: Callable[[Path], str]
) -> None:
    import re

    from megarl.loops.saving.checkpointing import survey_checkpoints
    from megarl.tracking.run_record import RunRecord
    from megarl.types import DataError

    home = shutil.copytree(runs.run("whole") / "checkpoints", tmp_path / "checkpoints")
    names = [f"step_{step:06d}" for step in (STEPS, STEPS - EVERY, STEPS - 2 * EVERY)]
    found = survey_checkpoints(RunRecord.read(tmp_path))
    assert found.newest_intact == home / names[0] and not found.damaged
    for name in names[:-1]:
        reason = fault(home / name)
        older = home / names[names.index(name) + 1]
        found = survey_checkpoints(RunRecord.read(tmp_path))
        assert found.newest_intact == older and (home / name).is_dir()
        assert [*found.damaged] == [name] and re.search(reason, found.damaged[name])
        found.clean_folder(home)
        assert (home / f"{name}.damaged").is_dir() and (home / "latest").read_text() == f"{older.name}\n"
    fault(home / names[-1])
    with pytest.raises(DataError, match="none of the run's 3 checkpoints can be loaded"):
        survey_checkpoints(RunRecord.read(tmp_path))
    assert not (home / "sprung").exists()


def test_a_run_without_checkpoints_starts_again(runs: Runs) -> None:
    folder = runs.run("none")
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    (folder / "samples/step_000001.jsonl").write_text("{}\n")
    output = runs.train(
        "recipe.yaml", "name=none", "train.steps=1", "optimizer.warmup_steps=0", "checkpoint.every_steps=0", "--resume"
    )
    assert "has no checkpoint yet: starting from the beginning" in output
    assert [step["step"] for step in logged_steps(folder)] == [0, 1]
    # Six prompts of four samples at a time until four groups pass, and four held-out answers of each set.
    drawn = len((folder / "samples/step_000001.jsonl").read_text().splitlines()) - 8
    assert drawn >= 24 and drawn % 24 == 0
    assert not (folder / "checkpoints").exists()
