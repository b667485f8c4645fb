"""Model cards: huggingface_hub's own parser reads their metadata; the text has results, recipe and versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import EvalResult

from megarl.files import hub
from megarl.report.model_card import write_card

RECIPE = {
    "name": "math", "loop": "rl", "model": {"path": "models/Qwen3-8B"}, "data": {
        "train": "train@me/sums/main",
        "validation": {"heldout": "data/heldout.jsonl", "sums": {"path": "test@me/sums/main", "fields": {}}}},
    "algorithm": {"preset": "grpo"}, "train": {"steps": 4},
}  # fmt: skip
ROWS = [
    {"step": 0, "val/heldout/accuracy": 0.25, "val/heldout/accuracy/low": 0.2, "val/heldout/accuracy/high": 0.3},
    {"step": 3, "val/heldout/accuracy": 0.9, "val/heldout/accuracy/low": 0.8, "val/heldout/accuracy/high": 0.95},
    {
        "step": 4,
        "val/heldout/accuracy": 0.5, "val/heldout/accuracy/low": 0.4375, "val/heldout/accuracy/high": 0.5625,
        "val/sums/pass_at_4": 0.75, "val/sums/pass_at_4/low": 0.7, "val/sums/pass_at_4/high": 0.8,
        "val/game/data_source/b/reward/mean": 2.5, "val/game/data_source/b/reward/mean/low": 2.0,
        "val/game/data_source/b/reward/mean/high": 3.0, "val/heldout/completion_tokens": 12.0, "reward/mean": 0.5,
    },
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with an exported model, in the current folder."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs/math"
    (made / "hf").mkdir(parents=True)
    (made / "hf/config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (made / "config.yaml").write_text(yaml.safe_dump(RECIPE))
    (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (made / "status.json").write_text('{"state": "done", "step": 4}')
    (made / "logs/attempt_1").mkdir(parents=True)
    (made / "logs/attempt_1/attempt.json").write_text('{"versions": {"megarl": "0.1.0", "torch": "2.13.0"}}')
    return made


def card_of(run: Path, step: int = 4, **arguments: Any) -> ModelCard:
    write_card(run, run / "hf", step, **arguments)
    return ModelCard.load(run / "hf/README.md")


def found_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Put a repository in the Hub's cache: `models--OWNER--NAME` or `datasets--OWNER--NAME`."""
    repository = tmp_path / "cache" / folder
    (repository / "snapshots/abc/main").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.cached_folder.cache_clear()


def test_results_have_their_intervals_and_those_of_other_steps_are_left_out(run: Path) -> None:
    card = card_of(run)
    results = {(one.dataset_name, one.metric_type): one for one in card.data.eval_results or ()}
    assert {key: one.metric_value for key, one in results.items()} == {
        ("heldout", "accuracy"): 0.5,
        ("sums", "pass_at_4"): 0.75,
        ("game/data_source/b", "reward/mean"): 2.5,
    }
    accuracy = results["heldout", "accuracy"]
    assert isinstance(accuracy, EvalResult)
    assert accuracy.metric_name == "accuracy (95 % interval 0.4375 to 0.5625)"
    assert accuracy.metric_args == {"confidence": 0.95, "low": 0.4375, "high": 0.5625}
    assert "| heldout | accuracy | 0.5 | 0.4375 to 0.5625 | 0.25 |" in card.text
    assert "| sums | pass_at_4 | 0.75 | 0.7 to 0.8 | not measured |" in card.text
    # No evaluation is claimed for a step without one.
    other = card_of(run, step=2)
    assert other.data.eval_results is None and "of step 2, was not evaluated" in other.text


def test_a_run_without_a_recipe_has_a_card_that_says_so(run: Path) -> None:
    (run / "config.yaml").unlink()
    assert (
        "an unknown model, trained for 4 steps by an unknown method with megarl on unknown data." in card_of(run).text
    )


def test_metadata_recipe_and_versions(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_in_cache(tmp_path, monkeypatch, "datasets--me--sums")
    try:
        card = card_of(run, name="me/math")
    finally:
        hub.cached_folder.cache_clear()
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.datasets == ["me/sums"] and card.data.tags == ["megarl", "rl", "grpo"]
    kinds = {one.dataset_name: one.dataset_type for one in card.data.eval_results or ()}
    assert kinds == {"heldout": "local", "sums": "me/sums", "game/data_source/b": "local"}
    assert 'AutoModelForCausalLM.from_pretrained("me/math")' in card.text
    block = card.text.partition("```yaml\n")[2].partition("\n```")[0]
    assert yaml.safe_load(block) == RECIPE
    assert "- megarl 0.1.0\n- torch 2.13.0" in card.text


def test_the_base_model_is_named_only_if_it_is_known(
    run: Path, tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models/Qwen3-8B"
    shutil.copytree(tiny_model(), folder)
    # The folder has the name of a published model, but not its sizes.
    assert card_of(run).data.base_model is None
    published = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}
    (folder / "config.json").write_text(json.dumps(published))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\ntags: [chat]\n---\n# Qwen\n")
    card = card_of(run)
    assert card.data.base_model == "Qwen/Qwen3-8B"
    assert card.data.to_dict()["license"] == "apache-2.0" and card.data.tags == ["megarl", "rl", "grpo"]
    # A model that an earlier run made has that run's base model.
    (folder / "README.md").write_text("---\ntags: [megarl]\nbase_model: me/first\n---\n")
    assert card_of(run).data.base_model == "me/first"
    # A broken card of the base model breaks nothing.
    (folder / "README.md").write_bytes(b"---\n[\xff\n---\n")
    assert card_of(run).data.base_model == "Qwen/Qwen3-8B"


def test_evaluations_of_the_exported_model_are_results(run: Path) -> None:
    evaluation = run / "evaluations/hf_math"
    evaluation.mkdir(parents=True)
    (evaluation / "answers.jsonl").write_text(json.dumps({"set": "heldout", "problem": 0, "answer_correct": True}))
    measure = {"value": 0.625, "low": 0.6, "high": 0.65, "interval": "bootstrap"}
    summary = {"model": str(run / "hf"), "sets": {"heldout": {"measures": {"majority_at_8": measure}}}}
    (evaluation / "metrics.json").write_text(json.dumps(summary))
    sampling = {"samples_per_prompt": 8, "sampling": {"temperature": 0.5}}
    (evaluation / "config.yaml").write_text(yaml.safe_dump({"name": "math", "evaluation": sampling}))
    card = card_of(run)
    [result] = [one for one in card.data.eval_results or () if one.metric_type == "majority_at_8"]
    assert (result.metric_value, result.dataset_config) == (0.625, "heldout, attempts 8, temperature 0.5")
    assert "| heldout | majority_at_8 (attempts 8, temperature 0.5) | 0.625 | 0.6 to 0.65 | not measured |" in card.text
    (evaluation / "metrics.json").write_text(json.dumps({**summary, "model": str(run / "hf_best")}))
    assert "majority_at_8" not in card_of(run).text


def test_a_recipe_with_a_fence_stays_inside_its_block(run: Path) -> None:
    recipe = {**RECIPE, "data": {"train": "me.jsonl", "system_prompt": "```\n# Not a heading\n```"}}
    (run / "config.yaml").write_text(yaml.safe_dump(recipe, default_style="|"))
    text = card_of(run).text
    assert text.count("\n````yaml\n") == 1 and text.partition("````yaml\n")[2].count("\n````\n") == 1
