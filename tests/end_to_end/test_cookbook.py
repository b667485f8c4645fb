"""The cookbook's own loops, unchanged, against a service with a tiny model.

Only their inputs are local: data sets and tokenizer are folders with the names that the loops ask the Hub for. The
package is installed without its dependencies, because one of them (tml-renderers) is in no registry. The loops do not
import it. The installation asks the registry.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.test_service import LEARNER, SIZES, read_url
from tools.make_dataset import make_dataset

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(3600)]

PACKAGES = ("tinker-cookbook==0.6.1", "chz==0.4.0", "blobfile==3.3.0", "lxml==6.1.3", "pylatexenc==2.11")
RECIPE = """
name: served
loop: rl
model: {{path: model, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 448}}
cluster: {{ranks_per_node: {num_ranks}}}
trainer: {{{trainer}max_tokens_per_microbatch: 2048}}
lora: {{rank: 32}}
rollout: {{{placement}, kv_cache_gib: 0.1, sampling: {{max_new_tokens: 64}}}}
train: {{steps: 1, prompts_per_step: 2, samples_per_prompt: 2}}
"""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""What `rl_loop` adds to each question."""
ANSWER = "\\boxed{%d}"
QUESTIONS = [f"{number}?" for number in range(64)]


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the cookbook's package and of the modules that its two loops import."""
    folder = tmp_path_factory.mktemp("cookbook")
    install = ["pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", str(folder), *PACKAGES]
    subprocess.run([sys.executable, "-m", *install], check=True)
    return folder


def write_lines(file: Path, lines: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_example(cookbook: Path) -> list[dict[str, str]]:
    """The conversation that `rl_loop` puts before each question. Supervised learning must know it too."""
    tree = ast.parse((cookbook / "tinker_cookbook/recipes/rl_loop.py").read_text())
    [value] = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "convo_prefix"
    ]
    # Each text is a literal, or one with the suffix added.
    texts = [part for part in ast.walk(value) if isinstance(part, ast.Constant) and len(str(part.value)) > 10]
    question, answer = (str(part.value) for part in sorted(texts, key=lambda part: part.lineno))
    return [{"role": "user", "content": question + SUFFIX}, {"role": "assistant", "content": answer}]


@pytest.fixture
def folder(tmp_path: Path, cookbook: Path, tiny_model: Callable[..., Path]) -> Path:
    """Working folder of service and loops. `datasets` and `transformers` prefer its folders to names on the Hub."""
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    for place in ("model", "Qwen/Qwen3-8B"):
        shutil.copytree(tiny_model(**LEARNER), tmp_path / place)
    conversations = [
        [
            *read_example(cookbook),
            {"role": "user", "content": question + SUFFIX},
            {"role": "assistant", "content": ANSWER % (number % 2)},
        ]
        for number, question in enumerate(QUESTIONS * 16)
    ]
    write_lines(tmp_path / "HuggingFaceH4/no_robots/train.jsonl", [{"messages": turns} for turns in conversations])
    # Supervised learning answers 0 and 1 alike. Rewards then prefer 1.
    problems = [{"question": question, "answer": "#### 1"} for question in QUESTIONS]
    write_lines(tmp_path / "openai/gsm8k/main/train.jsonl", problems)
    card = "---\nconfigs:\n- config_name: main\n  data_files: main/train.jsonl\n---\n"
    (tmp_path / "openai/gsm8k/README.md").write_text(card)
    return tmp_path


class Served:
    """A service in a folder, and the loops against it."""

    def __init__(self, folder: Path, cookbook: Path) -> None:
        self._folder, self._cookbook = folder, cookbook
        self.process: subprocess.Popen[str] | None = None
        self._url = ""

    def start(self) -> None:
        command = [sys.executable, "-m", "megarl", "service", "recipe.yaml", "--port", "0"]
        command += ["cluster.start_timeout_seconds=1800", "--serve-as", "Qwen/Qwen3-8B", "--tokenizer", "Qwen/Qwen3-8B"]
        self.process = subprocess.Popen(command, cwd=self._folder, stdout=-1, stderr=subprocess.STDOUT, text=True)
        self._url = read_url(self.process.stdout)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def begin(self, loop: str, name: str, *settings: str) -> subprocess.Popen[bytes]:
        """Start a loop whose records are in the folder `name`."""
        environment = {
            **os.environ, "PYTHONPATH": str(self._cookbook), "TINKER_BASE_URL": self._url, "TINKER_API_KEY": "tml-any",
            "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self._folder / "cache"),
        }  # fmt: skip
        program = [sys.executable, "-m", f"tinker_cookbook.recipes.{loop}", "model_name=Qwen/Qwen3-8B"]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*program, f"log_path={self._folder / name}", *settings],
                cwd=self._folder, env=environment, stdout=log, stderr=log,
            )  # fmt: skip

    def run(self, loop: str, name: str, *settings: str) -> list[dict[str, Any]]:
        """Run a loop to its end, and return its metrics."""
        ended = self.begin(loop, name, *settings).wait(1800)
        assert ended == 0, (self._folder / f"{name}.log").read_text()[-3000:]
        return self.metrics(name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        file = self._folder / name / "metrics.jsonl"
        # The last line may be incomplete while the loop runs.
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


@pytest.fixture
def served(request: pytest.FixtureRequest, folder: Path, cookbook: Path) -> Iterator[Served]:
    num_ranks, trainer, placement = SIZES[request.param]
    recipe = RECIPE.format(num_ranks=num_ranks, trainer=trainer, placement=placement)
    (folder / "recipe.yaml").write_text(recipe)
    service = Served(folder, cookbook)
    service.start()
    yield service
    service.kill()


SUPERVISED = ("batch_size=16", "max_length=768", "learning_rate=0.01", "save_every=20", "max_steps=60")
REINFORCED = ("batch_size=8", "group_size=8", "max_tokens=40", "learning_rate=0.003", "save_every=4")


@pytest.mark.parametrize("served", ["colocated", "dp 2", "tp 2"], indirect=True)
def test_the_loops_learn_and_resume_by_path_after_a_kill_of_the_service(served: Served, folder: Path) -> None:
    loop = served.begin("sl_loop", "sl", *SUPERVISED)
    log = folder / "sl" / "metrics.jsonl"
    # A checkpoint of step 20 is on the disk, and later steps are not in it.
    while loop.poll() is None and not (log.exists() and len(served.metrics("sl")) >= 23):
        time.sleep(0.05)
    assert loop.poll() is None, (folder / "sl.log").read_text()[-3000:]
    assert served.process is not None
    served.process.send_signal(signal.SIGKILL)
    loop.kill()
    loop.wait()
    served.process.wait()
    served.start()
    lines = served.run("sl_loop", "sl", *SUPERVISED)
    steps: dict[int, list[float]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line["train_mean_nll"])
    assert sorted(steps) == list(range(60))
    repeated = [values for values in steps.values() if len(values) > 1]
    assert 3 <= len(repeated) < 40 and all(len(set(values)) == 1 for values in repeated), "the same bits again"
    assert steps[59][-1] < 0.5 * steps[0][0]
    # Reinforcement learning begins with the final state of the supervised loop, as a resumed loop does.
    [*_, final] = [json.loads(line) for line in (folder / "sl" / "checkpoints.jsonl").read_text().splitlines()]
    for loss in ("importance_sampling", "cispo"):
        write_lines(folder / loss / "checkpoints.jsonl", [{**final, "batch": 0}])
        rewards = [line["reward/total"] for line in served.run("rl_loop", loss, *REINFORCED, f"loss_fn={loss}")]
        assert len(rewards) == 8 and np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.05, rewards
    # The loop's default loss is refused by name, at once.
    write_lines(folder / "default" / "checkpoints.jsonl", [{**final, "batch": 0}])
    assert served.begin("rl_loop", "default", *REINFORCED, "max_steps=1").wait(600) != 0
    refusal = (folder / "default.log").read_text()
    assert "stable_reinforce" in refusal and "importance_sampling" in refusal
