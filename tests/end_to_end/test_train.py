"""`megarl train` as a person runs it: a fine-tuning and a GRPO run on two ranks, and all they leave behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.child_processes import is_alive, rank_processes
from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps
from tests.stand_ins.terminal_screen import run_in_terminal, shown
from tools.make_dataset import make_dataset
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end


@dataclass(frozen=True)
class Runs:
    """A folder with a tiny model, data, a chat template and two finished runs.

    That of reinforcement learning has its data in verl's format, a folder of two shards and another split.
    """

    folder: Path
    model: Path
    screens: dict[str, str]
    """The output of the runs: fine-tuning wrote to a terminal, the other one through a pipe."""

    def train(self, *arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MEGARL, "train", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=900, **kwargs
        )

    def steps(self, name: str) -> list[dict[str, Any]]:
        return logged_steps(self.folder / "runs" / name)

    def status(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs" / name / "status.json").read_text())


def in_verls_format(path: Path, folder: Path) -> None:
    """Write a file's problems as verl has them, in two shards of a split of a folder."""
    folder.mkdir()
    for number, line in enumerate(path.read_text().splitlines()):
        own = json.loads(line)
        messages = own["messages"] if isinstance(own["messages"], list) else [own["messages"]]
        record = {"data_source": "sums", "prompt": messages, "extra_info": {"index": number}}
        record["reward_model"] = {"style": "rule", "ground_truth": own["gt_answer"]}
        with (folder / f"train-{number % 2:05d}-of-00002.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    (folder / "test-00000-of-00001.jsonl").write_text("not to be read")


LONGEST = "val/heldout/completion_tokens/mean"
RECIPE = """
model: {{path: {model}, dtype: float32}}
data: {{train: data/{data}.jsonl, validation: {{heldout: data/heldout.jsonl}}, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: {learning_rate}}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 24}}}}
evaluation: {{max_problems: 16}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("end_to_end"), tiny_model(), {})
    make_dataset(runs.folder / "data", sft=256, train=64, heldout=32)
    sft = RECIPE.format(model=runs.model, data="sft", learning_rate="2e-3")
    # A model that has learnt to end its answers is not the best by this.
    sft = sft.replace("{max_problems: 16}", "{max_problems: 16, every_steps: 4}")
    sft += f"checkpoint: {{every_steps: 4, export_every_steps: 4, keep: 1, best: {LONGEST}}}\n"
    (runs.folder / "sft.yaml").write_text(f"name: sft\nloop: sft\ntrain: {{steps: 12, prompts_per_step: 32}}\n{sft}")
    in_verls_format(runs.folder / "data/train.jsonl", runs.folder / "data/verl")
    (runs.folder / "own.jinja").write_text(
        "{#- the recipe's own -#}\n" + (runs.model / "chat_template.jinja").read_text()
    )
    rl = RECIPE.format(model="runs/sft/hf, chat_template: own.jinja", data="train", learning_rate="1e-4")
    rl = rl.replace("data/train.jsonl", "train@data/verl")
    rl = rl.replace("{max_problems: 16}", "{max_problems: 8, samples_per_prompt: 2, k: [1, 2]}")
    rl = rl.replace("ranks_per_node: 2", "ranks_per_node: 2, peak_tflops: 0.5")
    (runs.folder / "rl.yaml").write_text(
        "name: rl\nloop: rl\n"
        "train: {epochs: 0.125, prompts_per_step: 4, samples_per_prompt: 4, profile_steps: [2],\n"
        f"        profile_with: [spans, torch]}}\n{rl}"
    )
    code, runs.screens["sft"] = run_in_terminal([*MEGARL, "train", "sft.yaml"], runs.folder)
    assert code == 0, runs.screens["sft"]
    done = runs.train("rl.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    runs.screens["rl"] = done.stdout + done.stderr
    return runs


def test_a_run_folder_holds_what_happened(runs: Runs) -> None:
    from megarl.config.recipe import load

    for name, last in (("sft", 12), ("rl", 2)):
        assert runs.status(name) == {"state": "done", "step": last, "cause": None, "exit_code": 0}
        assert [step["step"] for step in runs.steps(name)] == list(range(last + 1))
        folder = runs.folder / "runs" / name
        assert load(folder / "config.yaml").name == name
        assert {path.name for path in folder.iterdir()} >= {"tensorboard", "samples", "hf", "logs"}
    assert runs.steps("sft")[12]["train/loss"] < 0.7 * runs.steps("sft")[1]["train/loss"]
    assert 0 <= runs.steps("sft")[12]["val/heldout/accuracy"] <= 1
    samples = (runs.folder / "runs/rl/samples/step_000001.jsonl").read_text().splitlines()
    assert len(samples) == 16
    assert json.loads(samples[0]).keys() >= {"prompt", "completion", "reward", "answer"}


def test_every_metric_is_in_the_table(runs: Runs) -> None:
    for name in ("sft", "rl"):
        assert unknown_metrics(runs.folder / "runs" / name) == set()


def test_throughput_and_memory_are_measured(runs: Runs) -> None:
    *_, sft = runs.steps("sft")
    for step in runs.steps("rl")[1:]:
        ranks = 2
        num_tokens = 16 * (step["rollout/prompt_tokens/mean"] + step["rollout/completion_tokens/mean"])
        # The logged time is a little longer than the measured one: it includes the calls that measure.
        logged_tokens = step["perf/tokens_per_second_per_rank"] * ranks * step["time/step_seconds"]
        assert 0.999 * num_tokens <= logged_tokens < 1.5 * num_tokens
        assert step["rollout/sampled_tokens"] == pytest.approx(16 * step["rollout/completion_tokens/mean"])
        assert 0 < step["perf/mfu"] < 1 and step["perf/mfu"] == pytest.approx(2 * step["perf/tflops_per_rank"])
        assert 0 <= step["time/ranks_idle"] < 1 and 0 < step["memory/kv_usage"] <= 1
        assert step["perf/preemptions"] == 0
        # Before its only update a step's policy is that of before the step.
        assert "kl/update" not in step
        assert step["reward/min"] <= step["reward/mean"] <= step["reward/max"]
        for phase in ("rollout", "train", "reshard"):
            assert 0.1 < step[f"memory/{phase}_gib"] < 100
    assert [step["data/epoch"] for step in runs.steps("rl")[1:]] == pytest.approx([4 / 64, 8 / 64])
    # Of a CPU whose peak no recipe names there is no utilisation.
    assert "perf/mfu" not in sft and sft["perf/tflops_per_rank"] > 0 and "memory/train_gib" in sft
    assert "rollout/prompt_tokens/mean" not in sft and sft["data/epoch"] > runs.steps("sft")[1]["data/epoch"]


PHASES = ("checking the recipe", "loading libraries", "starting 2 ranks", "building models", "evaluation")


def test_the_screen_shows_progress_and_nothing_of_other_libraries(runs: Runs) -> None:
    seen = {phase for phase in PHASES if re.search(rf"{phase} \d+ s", runs.screens["sft"])}
    # A phase shorter than a quarter of a second may fall between two refreshes of the live line.
    assert seen >= {*PHASES} - {"starting 2 ranks", "evaluation"}, seen
    on_terminal = [line.rstrip() for line in shown(runs.screens["sft"]) if line.strip()]
    through_pipe = runs.screens["rl"].splitlines()
    assert "\x1b" not in runs.screens["rl"] and "\r" not in runs.screens["rl"]
    own = re.compile(
        r"sft \(sft\)|rl \(rl\)|[┏━┓┃┡┩│└─┴┘┌┬┐├┼┤]|step \d+/\d+ "
        r"| +(reward|loss) .*s/step    left$| +val/\w+/accuracy="
        r"|megarl: checking |(reading data|starting 2 ranks|building models|exporting the model)$"
        r"|trainer against transformers: log-probs of \d+ tokens differ by "
        r"|(done|model|accuracy|time|next)  |  +(megarl|tensorboard) |warning: |profile of step 2: "
    )
    for lines in (on_terminal, through_pipe):
        assert [line for line in lines if not own.match(line)] == []
        assert not [line for line in lines if line.startswith("warning: ") and "megarl" not in line]
        # Standard error, with the warning about tp, follows the standard output here.
        closing = [line.split()[0] for line in lines if not line.startswith("warning: ")][-7:]
        assert closing == ["done", "model", "accuracy", "time", "next", "megarl", "tensorboard"]
    assert sum(line.startswith("step ") for line in on_terminal) == 13
    [last] = [line for line in through_pipe if line.startswith("step 2/2 ")]
    [header] = [line for line in through_pipe if line.endswith(" left")]
    labels = ["reward", "accuracy", "length", "trunc.", "gap", "entropy", "tok/s/rank", "s/step", "left"]
    assert [label for label in header.split() if label != "KL"] == labels
    assert len(last) == len(header) <= 100 and "-" not in last.split()
    for name, screen in (("sft", on_terminal), ("rl", through_pipe)):
        log = (runs.folder / f"runs/{name}/logs/latest/driver.log").read_text(encoding="utf-8").splitlines()
        assert [line for line in log if line not in screen] == []
        assert {line for line in screen if re.match(r"step |done  ", line)} <= {*log}


def test_a_profile_has_the_time_of_driver_and_ranks(runs: Runs) -> None:
    path = runs.folder / "runs/rl/profiles/step_000002.json"
    assert sorted(file.name for file in path.parent.iterdir()) == ["step_000002", path.name]
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert [names[process].split(" on ")[0] for process in sorted(names)] == ["driver", "rank 0", "rank 1"]
    [whole] = [event for event in events if event["name"] == "step 2"]
    assert (whole["pid"], whole["ts"]) == (0, 0)
    wall_seconds = whole["dur"] / 1e6
    assert wall_seconds == pytest.approx(runs.steps("rl")[2]["time/step_seconds"], rel=0.2, abs=0.2)
    by_process = {process: [e for e in events if e["pid"] == process and e is not whole] for process in names}
    phases = {"rollout", "logprobs", "advantages", "train", "metrics", "reshard", "samples", "evaluation", "log"}
    assert phases <= {event["name"] for event in by_process[0]}
    for process in (1, 2):
        found = {event["name"] for event in by_process[process]}
        assert found >= {"advance", "policy.update", "forward and backward", "optimizer", "reshard", "move weights"}
        # On one axis: a rank's updates are within the driver's phase.
        [phase] = [event for event in by_process[0] if event["name"] == "train"]
        [update] = [event for event in by_process[process] if event["name"] == "policy.update"]
        assert phase["ts"] <= update["ts"] and update["ts"] + update["dur"] <= phase["ts"] + phase["dur"] + 1
    for spans in by_process.values():
        assert_nested(spans)
    reached, seconds = 0.0, 0.0
    for event in sorted((e for e in events if e is not whole), key=lambda e: e["ts"]):
        end = min(event["ts"] + event["dur"], whole["dur"])
        seconds += max(0.0, end - max(reached, event["ts"])) / 1e6
        reached = max(reached, end)
    facts = trace["otherData"]
    assert facts["covered"] == pytest.approx(seconds / wall_seconds, abs=1e-3)
    assert seconds >= 0.98 * wall_seconds and 0 < facts["covered_by_ranks"] < facts["covered"]
    assert facts["spans"] == [len(by_process[process]) for process in sorted(names)]
    assert 0 < max(facts["spans"]) * facts["seconds_of_a_span"] <= 0.01 * wall_seconds


def test_a_profile_by_torch_has_operators_within_phases(runs: Runs) -> None:
    files = sorted((runs.folder / "runs/rl/profiles/step_000002").iterdir())
    assert [file.name for file in files] == ["rank_0.json.gz", "rank_1.json.gz"]
    for file in files:
        with gzip.open(file, "rt") as trace:
            events = [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]
        by_name: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            by_name.setdefault(event["name"], []).append(event)
        for outer, inner in (
            ("phase train", "policy.update"),
            ("phase train", "optimizer"),
            ("phase rollout", "advance"),
        ):
            phases = [(event["ts"], event["ts"] + event["dur"]) for event in by_name[outer]]
            for event in by_name[inner]:
                assert any(begin <= event["ts"] and event["ts"] + event["dur"] <= end for begin, end in phases), inner
        [(begin, end)] = [(event["ts"], event["ts"] + event["dur"]) for event in by_name["policy.update"]]
        products = [event for name in ("aten::mm", "aten::addmm", "aten::bmm") for event in by_name.get(name, ())]
        assert any(begin <= event["ts"] <= end for event in products), "no product of matrices in the update"


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """Spans of a process are within each other or apart, as viewers want them; times are rounded to nanoseconds."""
    is_open: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while is_open and is_open[-1] <= span["ts"] + 0.01:
            is_open.pop()
        assert not is_open or end <= is_open[-1] + 0.01, span
        is_open.append(end)


def test_a_report_shows_both_runs(runs: Runs) -> None:
    done = subprocess.run([*MEGARL, "report", "runs/sft", "runs/rl"], cwd=runs.folder, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (runs.folder / "report.html").read_text()
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [run["label"] for run in shown["runs"]] == ["sft", "rl"]
    assert {"train/loss", "reward/mean", "val/heldout/accuracy"} <= {chart["metric"] for chart in shown["charts"]}
    found = shown["runs"][1]["samples"]["tokens"]
    assert [sample["step"] for sample in found] == [2, 2, 2, 2, 1, 1, 1, 1]
    for columns in (sample["columns"] for sample in found):
        assert set(columns["weight_version"]) <= {1, 2} and columns["turn"] == [0] * len(columns["text"])
        assert columns["trainer_logprob"] == pytest.approx(columns["rollout_logprob"], rel=1e-3, abs=1e-4)
        assert 0 < max(map(abs, columns["logprob_gap"])) <= 1e-5
    environment = shown["runs"][1]["attempts"][0]["environment"]
    assert environment["ranks"].startswith("2 on ") and environment["megatron-core"]


def test_trainer_and_engine_give_the_same_logprobs(runs: Runs) -> None:
    for step in runs.steps("rl")[1:]:
        assert 0 < step["logprob_gap/mean"] <= step["logprob_gap/max"] <= 1e-5


def test_tensorboard_shows_the_same_scalars(runs: Runs) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs.folder / "runs/rl/tensorboard"))
    events.Reload()
    for name in ("reward/mean", "train/loss", "logprob_gap/max", "time/reshard_seconds", "perf/mfu"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({step["step"]: step[name] for step in runs.steps("rl")[1:]})


ANSWER_WITH_VLLM = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, seed=0)
prompt = {"prompt_token_ids": [int(token) for token in sys.argv[2].split()]}
print("TOKENS", *llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids)
"""


def test_the_exported_model_serves_in_transformers_and_in_a_stock_vllm(runs: Runs, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs.folder / "runs/rl/hf"
    for file in ("generation_config.json", "tokenizer.json"):
        assert (folder / file).read_bytes() == (runs.model / file).read_bytes()
    assert (folder / "chat_template.jinja").read_bytes() == (runs.folder / "own.jinja").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Calculate 4 + 3 - 2."}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    environment = os.environ | {
        "TMPDIR": str(tmp_path),  # vLLM leaves its files there
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    served = subprocess.run(
        [sys.executable, "-c", ANSWER_WITH_VLLM, folder, " ".join(map(str, prompt))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert served.returncode == 0, served.stderr
    (tokens,) = (line for line in served.stdout.splitlines() if line.startswith("TOKENS"))
    assert [int(token) for token in tokens.split()[1:]] == output


def test_an_evaluation_of_the_export_is_that_of_the_run(runs: Runs) -> None:
    evaluate = ("eval", "runs/rl", "rl.yaml", "--out", "evaluated", "data.train=not_needed.jsonl")
    done = run_megarl(*evaluate, folder=runs.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "majority_at_2" in done.stdout and "evaluated" in done.stdout
    found = json.loads((runs.folder / "evaluated/metrics.json").read_text())
    of_run = {name: value for name, value in runs.steps("rl")[-1].items() if name.startswith("val/")}
    assert {"val/heldout/accuracy", "val/heldout/pass_at_2", "val/heldout/majority_at_2/high"} <= of_run.keys()
    assert found["metrics"] == of_run
    answers = (runs.folder / "evaluated/answers.jsonl").read_text().splitlines()
    recorded = (runs.folder / "runs/rl/samples/step_000002.jsonl").read_text().splitlines()
    assert len(answers) == 16 and answers == [line for line in recorded if '"set"' in line]
    assert found["sets"]["heldout"]["problems"] == 8 and found["sets"]["heldout"]["temperature"] == 1.0


def test_the_model_of_the_best_evaluation_is_kept_with_its_checkpoint(runs: Runs) -> None:
    from safetensors.numpy import load_file

    folder = runs.folder / "runs/sft"
    measured = {row["step"]: row[LONGEST] for row in runs.steps("sft") if LONGEST in row and row["step"]}
    assert measured.keys() == {4, 8, 12}
    step = max(measured, key=measured.__getitem__)
    assert step != 12
    assert json.loads((folder / "hf_best/best.json").read_text()) == {
        "step": step, "metric": LONGEST, "value": measured[step],
    }  # fmt: skip
    names = ("hf_best", f"hf_step_{step:06d}", "hf")
    kept, own, last = (load_file(folder / name / "model.safetensors") for name in names)
    assert kept.keys() == own.keys() and all((kept[name] == own[name]).all() for name in kept)
    assert any((kept[name] != last[name]).any() for name in kept)
    assert {path.name for path in (folder / "checkpoints").glob("step_*")} == {f"step_{step:06d}", "step_000012"}
    assert not (folder / "hf_candidate").exists()


def test_a_finished_run_is_not_overwritten(runs: Runs) -> None:
    again = runs.train("rl.yaml")
    assert again.returncode == 2
    assert "runs/rl" in again.stderr and "name=" in again.stderr


def test_a_killed_worker_ends_the_run_and_is_named(runs: Runs) -> None:
    driver = subprocess.Popen(
        [*MEGARL, "train", "rl.yaml", "name=killed", "train.epochs=1000"],
        cwd=runs.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 900
        while not (runs.folder / "runs/killed/status.json").exists() or runs.status("killed")["step"] < 1:
            assert time.monotonic() < deadline and driver.poll() is None, driver.communicate()
            time.sleep(0.2)
        ranks = rank_processes(driver.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 76
    assert "rank 1" in errors and "SIGKILL" in errors
    status = runs.status("killed")
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 76, 1)
    assert not any(map(is_alive, ranks.values()))
