"""A model's way from the Hub and back: fetch by name, train, export, push, load again; and a fork of the run.

The Hub is a stand-in on this machine (`tests/stand_ins/hub_server.py`); its client is the real huggingface_hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from megarl.report.page import write_report
from megarl.tracking.run_record import RunRecord
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps
from tests.stand_ins.hub_server import TOKEN, Hub, hub_server

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: fetched
loop: sft
model: {path: megarl-tests/tiny, dtype: float32}
data: {train: train@megarl-tests/sums, validation_conversations: {heldout: test@megarl-tests/sums}}
cluster: {ranks_per_node: 1}
trainer: {max_tokens_per_microbatch: 256}
optimizer: {learning_rate: 1e-3, warmup_steps: 0}
train: {steps: 3, prompts_per_step: 2}
evaluation: {every_steps: 3}
checkpoint: {every_steps: 2, keep: 5}
"""
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert AutoTokenizer.from_pretrained(sys.argv[1]).chat_template
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class Client:
    """Runs programs in a folder, with the stand-in as their Hub."""

    folder: Path
    hub: Hub

    def run(self, *command: str, token: str | None = TOKEN, home: str = "home", code: int = 0) -> str:
        variables = {**os.environ, **self.hub.environment(self.folder / home, token=token)}
        environment = {name: value for name, value in variables.items() if value is not None}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        assert TOKEN not in output
        return output

    def megarl(self, *arguments: str, token: str | None = TOKEN, code: int = 0) -> str:
        return self.run(*MEGARL[1:], *arguments, token=token, code=code)


def equal_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.long
def test_a_model_is_fetched_trained_pushed_loaded_and_forked(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}
    data = 8 * (json.dumps({"messages": [question, answer]}) + "\n").encode()
    model = {path.name: path.read_bytes() for path in tiny_model(num_layers=1).iterdir()}
    base_card = b"---\nlicense: apache-2.0\n---\n# The base model\n"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run, forked = tmp_path / "runs/fetched", tmp_path / "runs/forked"
    with hub_server() as hub:
        hub.add("model", "megarl-tests/tiny", {**model, "README.md": base_card, "pytorch_model.bin": b"not read"})
        hub.add("dataset", "megarl-tests/sums", {f"{split}-00000-of-00001.jsonl": data for split in ("train", "test")})
        client = Client(tmp_path, hub)

        # A public model and data set need no token.
        output = client.megarl("train", "recipe.yaml", token=None)
        for field in ("tiny (model.path)", "sums (data.train)"):
            assert f"downloading megarl-tests/{field} from the Hub" in output
        assert not [request for request in hub.requests if "pytorch_model.bin" in request]
        card = ModelCard.load(run / "hf/README.md")
        assert (card.data.base_model, card.data.datasets) == ("megarl-tests/tiny", ["megarl-tests/sums"])
        assert card.data.to_dict()["license"] == "apache-2.0" and "# The base model" not in card.text

        output = client.megarl("export", "runs/fetched", "--push-to-hub", "me/sums", "--private")
        repository = hub.repositories["model", "me/sums"]
        assert repository.private and [*repository.commits.values()][1:] == ["Model of the run fetched after step 3"]
        assert f"pushed me/sums: commit {repository.head}" in output
        pushed = ModelCard(repository.files["README.md"].decode())
        [result] = pushed.data.eval_results or ()
        last = logged_steps(run)[-1]
        assert (result.metric_type, result.metric_value) == ("loss", last["val/heldout/loss"])
        assert 'from_pretrained("me/sums")' in pushed.text

        # Another machine, with an empty cache.
        client.run("-c", LOAD, "me/sums", "loaded", home="elsewhere")
        assert equal_weights(tmp_path / "loaded", run / "hf")

        client.megarl("export", "runs/fetched", "--step", "3", "--out", "again")
        assert equal_weights(tmp_path / "again", run / "hf")
        # The fork repeats the third step from the same weights, then trains one step more.
        client.megarl("fork", "runs/fetched", "--step", "2", "--set", "name=forked", "--set", "train.steps=4")
        assert json.loads((forked / "parent.json").read_text())["step"] == 2
        steps = logged_steps(forked)
        assert [step["step"] for step in steps] == [0, 1, 2, 3, 4] and steps[3]["train/loss"] == last["train/loss"]
        _, _, [reported] = write_report([forked])
        assert isinstance(reported, RunRecord) and reported.origin == f"fetched at step 2 ({run})"
        assert "fetched at step 2" in (forked / "report.html").read_text()
    # The server has ended: nothing answers at its address.
    recipe = RECIPE.replace("megarl-tests/tiny", "megarl-tests/other").replace("name: fetched", "name: other")
    (tmp_path / "other.yaml").write_text(recipe)
    error = client.megarl("train", "other.yaml", code=65)
    assert "model.path = megarl-tests/other: not a local path" in error and "the Hub cannot be reached" in error
    assert "hf download megarl-tests/other;" in error and not (tmp_path / "runs/other").exists()
