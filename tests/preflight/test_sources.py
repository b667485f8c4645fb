"""Environments, mixtures and files that do not fit a recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.datasets.counts import count_records
from megarl.preflight import check
from megarl.types import ConfigError, DataError


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("WANDB_API_KEY", "a key of the run's own", id="a tracker's key"),
        pytest.param("JUDGE_KEY", "a key of the run's own", id="a judge's key"),
        pytest.param("MEGARL_SERVE_TOKEN", "a key of the run's own", id="the endpoint's token"),
        pytest.param("NOT_SET_ANYWHERE", "no such variable", id="a variable that is not set"),
    ],
)
def test_an_agent_program_is_refused_the_keys_of_the_run(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    for key in ("WANDB_API_KEY", "JUDGE_KEY", "MEGARL_SERVE_TOKEN", "SEARCH_KEY"):
        monkeypatch.setenv(key, "secret")
    judge = {"name": "judge", "kwargs": {"url": "http://127.0.0.1:1", "model": "m", "api_key_env": "JUDGE_KEY"}}
    agent = {"command": ["true"], "environment": ["SEARCH_KEY", name]}
    with pytest.raises(ConfigError) as error:
        check(recipe(reward={"functions": [judge]}, rollout={"environment": "command", "agent": agent}))
    [line] = [line for line in str(error.value).splitlines() if "rollout.agent" in line]
    assert f"rollout.agent.environment.1 = {name}" in line and words in line and "secret" not in line


def test_faults_of_recipe_and_files_come_together(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = {"model": {"path": str(tmp_path)}, "data": {"train": "absent.jsonl", "validation": {"easy": str(empty)}}}
    files = (
        "config.json: not found",
        "neither model.safetensors nor",
        "tokenizer.json: not found",
        "absent.jsonl: data.train is not there",
        "empty.jsonl: data.validation.easy is empty",
    )
    with pytest.raises(ConfigError) as caught:
        check(recipe(**broken, rollout={"tp": 2}, train={"samples_per_prompt": 1}))
    told = str(caught.value)
    assert all(words in told for words in ("rollout.tp = 2", "train.samples_per_prompt = 1", *files))
    with pytest.raises(DataError) as files_alone:
        check(recipe(**broken))
    assert all(words in str(files_alone.value) for words in files)


def test_a_source_of_a_mixture_is_checked_as_a_recipe_is(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train = recipe().data.train
    sources: dict[str, Any] = {
        "sums": {"data": {"train": train}, "reward": {"functions": ["boxed", "boxed"]}},
        "games": {"data": {"train": "environment:4"}, "rollout": {"environment": "guess_number"}},
        "lost": {"data": {"train": str(tmp_path / "lost.jsonl")}, "rollout": {"sampling": {"max_new_tokens": 10**6}}},
    }
    mixture = {"data": {"max_prompt_tokens": 40}, "mixture": sources}
    with pytest.raises(ConfigError) as error:
        check(recipe(**mixture, trainer={"tp": 3}))
    lines = str(error.value).splitlines()[1:]
    shared = [line for line in lines if "trainer.tp = 3" in line]
    assert shared and len(set(shared)) == len(shared), "what all have in common is told once"
    assert not any("mixture." in line for line in shared)
    assert any("mixture.sums: reward.functions" in line and "twice" in line for line in lines)
    assert any("mixture.lost: " in line and "rollout.sampling.max_new_tokens" in line for line in lines)
    assert any(line.strip().startswith("mixture.lost: ") and "lost.jsonl" in line for line in lines)
    assert not any("mixture.games" in line for line in lines)
    del sources["lost"], sources["sums"]["reward"]
    sound = recipe(**mixture)
    check(sound)
    assert count_records(sound) == {"sums train": 3, "games train": 4}
    sources["sums"]["data"]["curriculum"] = {"band": [0.1, 0.9], "by": "level"}
    with pytest.raises(DataError, match=r"no field 'level', named by data\.curriculum\.by"):
        count_records(recipe(**mixture))


def test_a_record_s_prompt_for_the_teacher_is_read_or_refused(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"prompt": "q", "gt_answer": "4", "teacher_prompt": "q Solution: 4"}))
    taught: dict[str, Any] = {"teacher": "policy", "teacher_prompt": "{prompt} {context}"}

    def count(**changed: Any) -> dict[str, int]:
        return count_records(recipe(data={"train": str(train)}, **changed))

    with pytest.raises(DataError, match=r"line 1: 'teacher_prompt' is .*distillation\.context"):
        count(loop="distillation", distillation={**taught, "context": ["record.gt_answer"]})
    assert count(loop="distillation", distillation={**taught, "context": ["record.teacher_prompt"]}) == {"train": 1}
    assert count() == {"train": 1}


def test_a_chat_template_must_write_tools_and_show_how_it_writes_calls(
    recipe: Callable[..., Recipe], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    changed = {"model": {"path": str(model)}, "rollout": {"environment": "calculator"}}
    check(recipe(**changed))
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(plain)
    with pytest.raises(ConfigError, match=r"rollout\.tool_parser: .* give one of hermes"):
        check(recipe(**changed))
    changed["rollout"]["tool_parser"] = "hermes"
    with pytest.raises(
        ConfigError,
        match=r"rollout\.environment = 'calculator': the chat template does not write the tool, 'calculator'",
    ):
        check(recipe(**changed))
    (model / "chat_template.jinja").write_text("{{ tools }}" + plain.replace("%}{{", "if m.role != 'tool' %}{{", 1))
    with pytest.raises(ConfigError, match=r"does not write the content of messages\[0\], 'reply'"):
        check(recipe(**changed))
    (model / "chat_template.jinja").write_text(f"{{{{ tools }}}}{plain}")
    check(recipe(**changed))


@pytest.mark.parametrize(
    ("agent", "cluster", "place", "facts"),
    [
        ({"command": ["python", "agent.py"]}, {}, "rollout.agent.command = ['python', 'agent.py']", "folders"),
        ({"image": "/no/image"}, {}, "rollout.agent.image = /no/image", "unpack"),
        ({"folders": ["/usr", "usr"]}, {}, "rollout.agent.folders.1 = usr", "absolute"),
        ({"sandbox": "apptainer", "image": "i.sif"}, {}, "rollout.agent.sandbox = apptainer", "not installed"),
        ({"nodes": "all"}, {"launcher": "slurm"}, "rollout.agent.nodes = all", "rollout.endpoint.host=0.0.0.0"),
        ({"folders": ["/usr", "/tmp"]}, {}, "rollout.agent.folders.1 = /tmp", "megarl-containers-"),
        ({"outlive_seconds": 60}, {"launcher": "slurm"}, "outlive_seconds = 60", "leave out outlive_seconds"),
        ({"outlive_seconds": 60}, {"launcher": "ray"}, "outlive_seconds = 60", "leave out outlive_seconds"),
    ],
    ids=[
        "a relative script",
        "no image",
        "a relative folder",
        "no program",
        "unreachable nodes",
        "a folder with sockets",
        "outliving in Slurm",
        "outliving on Ray",
    ],
)
def test_a_container_that_cannot_work_is_refused(
    recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    agent: dict[str, Any],
    cluster: dict[str, Any],
    place: str,
    facts: str,
) -> None:
    agent = {"command": ["true"], "sandbox": "sandbox"} | agent
    if facts == "not installed":
        monkeypatch.setenv("PATH", "/bin/absent")
    with pytest.raises(ConfigError) as error:
        check(recipe(rollout={"environment": "command", "agent": agent}, cluster=cluster))
    assert any(place in line and facts in line for line in str(error.value).splitlines()), error.value


@pytest.mark.parametrize(
    ("toml", "agent", "facts"),
    [
        ("[agent]\ntimeout_sec = 900", {}, ["agent.timeout_sec = 900", "rollout.agent.timeout_seconds = 600; raise"]),
        ("[environment]\nmemory_mb = 4096", {"memory_gib": 2}, ["memory_mb = 4096", "rollout.agent.memory_gib = 2;"]),
        ("[environment]\nstorage_mb = 9000", {"disk_gib": 5}, ["storage_mb = 9000", "rollout.agent.disk_gib = 5;"]),
        ("[environment]\nstorage_mb = 9000", {"sandbox": "docker", "image": "i"}, ["storage_mb", "sandbox=sandbox"]),
        ("[environment]\ncpus = 9000", {}, ["environment.cpus = 9000", "lower it"]),
    ],
    ids=["time", "memory", "files", "files of docker", "CPUs"],
)
def test_a_task_that_needs_more_than_the_recipe_gives_is_refused(
    recipe: Callable[..., Recipe], tmp_path: Path, toml: str, agent: dict[str, Any], facts: list[str]
) -> None:
    (tmp_path / "task/tests").mkdir(parents=True)
    (tmp_path / "task/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "task/instruction.md").write_text("Add.")
    (tmp_path / "task/task.toml").write_text(toml)
    agent = {"command": ["true"], "sandbox": "sandbox"} | agent
    with pytest.raises(ConfigError) as error:
        check(recipe(data={"train": str(tmp_path)}, rollout={"environment": "command", "agent": agent}))
    [line] = [line for line in str(error.value).splitlines() if "task.toml" in line]
    assert all(fact in line for fact in facts), error.value


def test_a_file_that_is_no_image_of_apptainer_is_refused(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apptainer").write_text("#!/bin/sh\n")
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    agent = {"command": ["true"], "sandbox": "apptainer"}
    for image, facts in ((None, "image is missing"), (f"{tmp_path}/absent.sif", "apptainer build")):
        with pytest.raises(ConfigError, match=facts):
            check(recipe(rollout={"environment": "command", "agent": {**agent, "image": image}}))
