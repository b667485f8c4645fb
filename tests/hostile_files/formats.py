"""The file formats that megarl reads: a sample of each, and its reader."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.checkpoint.convert import find_checkpoint
from megarl.checkpoint.kept import read_tensor_places
from megarl.checkpoint.manifest import check_sizes, file_record, write_manifest
from megarl.checkpoint.torch_dist_reader import CheckpointReader, check_harmless
from megarl.config import AlgorithmConfig
from megarl.config.recipe import load
from megarl.data.chat import load_tokenizer, template_text
from megarl.data.reader import read_records
from megarl.environments.search import _build_index
from megarl.families.shape import read_model_shape
from megarl.files.folder_lock import HOME, owner_is_gone
from megarl.files.model_folder import (
    INDEX,
    check_model_folder,
    largest_token,
    max_values_of,
    read_safetensors_header,
    stored_names,
    weight_files,
)
from megarl.files.strict_json import LARGE, MEDIUM, SMALL
from megarl.loops.saving.driver_state import read_driver
from megarl.report.browse import Selection, sample_text, select
from megarl.report.evaluations import read_evaluation
from megarl.report.model_card import write_card
from megarl.report.page import render, render_evaluations
from megarl.report.replays import replay_contents
from megarl.report.watched import WatchedRun
from megarl.rollout.journal.state import JournalState
from megarl.rollout.journal.tries import JournaledAnswer, JournaledTry
from megarl.rollout.recording import RecordedCall
from megarl.rollout.state import RLState
from megarl.rollout.step.step_record import StepRecord
from megarl.tracking.draws import DrawEvents, account
from megarl.tracking.run_folder import _remove_later_lines
from megarl.tracking.run_record import RunRecord, refuse_other_schema, run_state
from megarl.types import Completion, FinishReason, Problem
from tools.make_tiny_model import make_tiny_model

RECIPE = """
name: small
loop: rl
seed: 3
model: {path: models/tiny, dtype: float32}
data: {train: data/train.jsonl, validation: {heldout: data/heldout.jsonl}}
rollout: {sampling: {max_new_tokens: 12, temperature: 1.5, stop: ["x"]}}
reward: {functions: [gsm8k]}
train: {steps: 4, prompts_per_step: 2, samples_per_prompt: 4}
"""
SAMPLE = {
    "set": "heldout",
    "source": "single_turn",
    "problem": 3,
    "attempt": 0,
    "prompt": [{"role": "user", "content": "2+2?"}],
    "rendered_prompt": "user: 2+2?",
    "completion": "It is 4.",
    "answer": "4",
    "reward": 1.0,
    "answer_correct": True,
    "finish_reason": "stop",
    "tokens": 5,
    "turns": [{"prompt": "a", "completion": "b"}],
}


@dataclass(frozen=True)
class Format:
    """A file format: `make` writes a valid sample into an empty folder and returns the mutated file."""

    name: str
    reader: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    never_raises: bool = False
    share: float = 1.0
    """Share of the mutations that this format gets. Below 1: its reader takes seconds for a hostile file."""
    max_values: int | None = SMALL
    """Maximum number of JSON values that the format's reader accepts: in a file, or in each line of JSON Lines. None:
    it accepts any number."""


def list_formats(shared: Path) -> Iterator[Format]:
    """Yield all formats. `shared` is an empty folder for samples that take long to make."""
    model = shared / "model"
    if not model.exists():
        make_tiny_model(model, num_layers=1)
    yield from _settings()
    yield from _data()
    yield from _model_folder(model)
    yield from _checkpoint(model)
    yield from _run_folder()
    yield from _rollout_state()


def _settings() -> Iterator[Format]:
    # PyYAML takes 700 bytes for a value, and a recipe may have 100,000.
    yield Format("recipe (YAML)", "config.recipe.load", _text("recipe.yaml", RECIPE), load, max_values=MEDIUM)
    yield Format(
        "chat template (Jinja)",
        "data.chat.template_text",
        _text("t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"),
        lambda path: template_text(load_recipe_model(path)),
    )


def load_recipe_model(path: Path) -> Any:
    from megarl.config.sections.policy_model import ModelConfig

    return ModelConfig(path="m", chat_template=str(path))


def _data() -> Iterator[Format]:
    rows = [
        {
            "messages": [{"role": "user", "content": f"{n} + 1?"}],
            "gt_answer": str(n + 1),
            "level": n,
            "extra": {"a": [n]},
        }
        for n in range(4)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    reader = "data.reader.read_records"

    def read(path: Path) -> None:
        for _ in read_records(path):
            pass

    def parquet(folder: Path) -> Path:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
        return folder / "train.parquet"

    def arrow(folder: Path) -> Path:
        import pyarrow

        table = pyarrow.Table.from_pylist(rows)
        with (
            pyarrow.OSFile(str(folder / "train.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
        return folder / "train.arrow"

    yield Format("data set (JSONL)", reader, _text("train.jsonl", lines), read, max_values=MEDIUM)
    # A list of records has any number of values.
    yield Format("data set (JSON)", reader, _text("train.json", json.dumps(rows)), read, max_values=None)
    # Not JSON, but the csv module takes 4 bytes for each character of a cell.
    yield Format(
        "data set (CSV)", reader, _text("train.csv", 'question,answer\n"1 + 1?",2\n3 + 1?,4\n'), read, max_values=MEDIUM
    )
    yield Format("data set (Parquet)", reader, parquet, read)
    yield Format("data set (Arrow)", reader, arrow, read)

    def search(path: Path) -> Any:
        _build_index.cache_clear()
        return _build_index(str(path)).find_best("paris", 2)

    documents = '{"text": "Paris is a city.", "title": "Paris"}\n{"text": "Rome is one too."}\n'
    yield Format(
        "search corpus (JSONL)", "environments.search", _text("corpus.jsonl", documents), search, max_values=MEDIUM
    )


def _model_folder(model: Path) -> Iterator[Format]:
    def copied(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            shutil.copytree(model, folder / "model")
            file = folder / "model" / name
            if name.endswith("index.json"):
                names = list(read_safetensors_header(file.parent / "model.safetensors"))
                file.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
            return file

        return make

    def shape(path: Path) -> Any:
        return read_model_shape(path.parent), check_model_folder(path.parent)

    yield Format(
        "model: config.json",
        "families.shape.read_model_shape",
        copied("config.json"),
        shape,
        max_values=max_values_of("config.json"),
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield Format(
            f"model: {name}",
            "data.chat.load_tokenizer",
            copied(name),
            lambda path: (largest_token(path.parent), load_tokenizer(path.parent)),
            share=0.2,
            max_values=max_values_of(name),
        )
    yield Format(
        "model: index",
        "files.model_folder.weight_files",
        copied("model.safetensors.index.json"),
        lambda path: (weight_files(path.parent), stored_names(path.parent)),
        max_values=max_values_of(INDEX),
    )
    yield Format(
        "model: safetensors",
        "files.model_folder, checkpoint.kept",
        copied("model.safetensors"),
        lambda path: (read_safetensors_header(path), list(read_tensor_places(path)), stored_names(path.parent)),
        max_values=LARGE,
    )


def _checkpoint(model: Path) -> Iterator[Format]:
    shape = read_model_shape(model)

    def converted(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            from megarl.checkpoint.convert import to_megatron

            to_megatron(model, folder / "checkpoint")
            # A conversion's own has argparse's class for Megatron-LM. A run's has plain values.
            common = next((folder / "checkpoint").rglob("common.pt"))
            torch.save({"iteration": 2, "args": {"tp": 1}}, common)
            return next(iter(sorted((folder / "checkpoint").rglob(name))))

        return make

    def read_all(path: Path) -> None:
        reader = CheckpointReader(path.parent, shape)
        for pieces in reader.pieces.values():
            for piece in pieces:
                reader.read_storage(piece.storage)

    yield Format("checkpoint: .metadata", "checkpoint.torch_dist_reader", converted(".metadata"), read_all, share=0.2)
    yield Format(
        "checkpoint: common.pt",
        "torch_dist_reader.check_harmless",
        converted("common.pt"),
        lambda path: check_harmless(path.parent),
        share=0.2,
    )
    yield Format("checkpoint: metadata.json", "checkpoint.torch_dist_reader", converted("metadata.json"), read_all)
    yield Format("checkpoint: .distcp", "checkpoint.torch_dist_reader", converted("*.distcp"), read_all, share=0.2)

    def tracker(folder: Path) -> Path:
        (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
        return folder / "latest_checkpointed_iteration.txt"

    yield Format("checkpoint: tracker", "checkpoint.convert", tracker, lambda path: find_checkpoint(path.parent))

    def manifest(folder: Path) -> Path:
        (folder / "a.bin").write_bytes(b"abc")
        write_manifest(folder, {"a.bin": file_record(folder / "a.bin")}, {"format": "torch_dist"})
        return folder / "manifest.json"

    yield Format(
        "manifest.json",
        "checkpoint.manifest",
        manifest,
        lambda path: check_sizes(path.parent),
        max_values=max_values_of("manifest.json"),
    )


def _run(folder: Path) -> Path:
    """Make the folder of a run with every file that a report reads. Returns its path."""
    run = folder / "run"
    for name in ("samples", "tokens", "replays", "logs/attempt_1", HOME, "checkpoints/step_000002"):
        (run / name).mkdir(parents=True)
    files: dict[str, Any] = {
        "status.json": {
            "state": "running",
            "step": 2,
            "cause": None,
            "exit_code": None,
            "health": [{"rule": "r", "step": 1, "text": "t"}],
        },
        "metrics.jsonl": [
            {"step": 1, "reward/mean": 0.5, "time/step_seconds": 2.0},
            {"step": 2, "evaluation_follows": True, "reward/mean": None},
            {"step": 2, "val/held/accuracy": 0.5},
        ],
        "versions.jsonl": [{"version": 1, "step": 1, "checksum": "ab"}],
        "parent.json": {"run": "runs/a", "name": "a", "step": 1, "megarl": "0.1.0"},
        "samples/step_000002.jsonl": [SAMPLE, {**SAMPLE, "set": ""}],
        "tokens/step_000002.jsonl": [{"tokens": [[7, "a", -0.5, -0.6, 1.0]], "reward": 1.0, "columns": ["id", "text"]}],
        "replays/step_000002.json": {
            "step": 2,
            "made": "now",
            "lines": ["same"],
            "changes": [],
            "metrics": {"a": [1, 2]},
            "samples": [{"r": [1.0, 2.0]}],
        },
        "logs/attempt_1/attempt.json": {
            "started": "2031-05-02T09:00:00+00:00",
            "machine": {"host": "n"},
            "versions": {"megarl": "0.1.0"},
            "step": 2,
        },
        "logs/attempt_1/notices.jsonl": [{"time": "t", "step": 1, "text": "warning"}],
        "checkpoints/step_000002/driver.json": {
            "schema": 6,
            "step": 2,
            "recipe": {"name": "small"},
            "models": {},
            "data": {},
        },
        f"{HOME}/00000001": {
            "host": "h",
            "boot_id": "b",
            "pid_namespace": "p",
            "pid": 1,
            "started": 2,
            "run": "r",
            "job": "",
        },
    }
    for name, value in files.items():
        rows = value if isinstance(value, list) else [value]
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text(RECIPE)
    (run / "logs/attempt_1/config.yaml").write_text(RECIPE)
    return run


def _run_folder() -> Iterator[Format]:
    def in_run(name: str) -> Callable[[Path], Path]:
        return lambda folder: _run(folder) / name

    def report(path: Path) -> None:
        run = next(parent for parent in path.parents if parent.name == "run")
        recorded = RunRecord.open(run)
        render([recorded])
        run_state(run, recorded.status)
        watched = WatchedRun(run)
        watched.refresh()
        write_card(run, run, 2)

    def earlier(path: Path) -> None:
        run = RunRecord.read(next(parent for parent in path.parents if parent.name == "run"))
        _ = run.recipe(), run.parent(), run.finished_text(4), run.refuse_newer_version()
        _remove_later_lines(path, 1) if path.name.endswith(".jsonl") else None

    for name in (
        "config.yaml",
        "status.json",
        "metrics.jsonl",
        "parent.json",
        "samples/step_000002.jsonl",
        "tokens/step_000002.jsonl",
        "logs/attempt_1/attempt.json",
        "logs/attempt_1/notices.jsonl",
    ):
        yield Format(
            f"run: {name}",
            "report (page, watch, model card)",
            in_run(name),
            report,
            never_raises=True,
            share=0.3,
            # A report reads status.json like a start does.
            max_values=MEDIUM if name.endswith(("status.json", ".jsonl")) else SMALL,
        )
    for name in (
        "config.yaml",
        "status.json",
        "metrics.jsonl",
        "versions.jsonl",
        "parent.json",
        "logs/attempt_1/attempt.json",
    ):
        # No line may be lost because it is long. The others are read like driver.json.
        max_values = None if name.endswith(".jsonl") else MEDIUM
        yield Format(
            f"run at a start: {name}", "tracking.run_record, run_folder", in_run(name), earlier, max_values=max_values
        )
    yield Format(
        "run: replays",
        "report.replays",
        in_run("replays/step_000002.json"),
        lambda path: replay_contents(path.parents[1]),
        never_raises=True,
        max_values=MEDIUM,
    )
    yield Format(
        "run: samples shown",
        "report.browse",
        in_run("samples/step_000002.jsonl"),
        lambda path: [
            sample_text(sample)
            for order in ("file", "best")
            for sample in select({2: path}, Selection(2, order, None, ""))
        ],
        never_raises=True,
        # All samples of a step.
        max_values=None,
    )
    yield Format(
        "checkpoint: driver.json",
        "loops.saving.driver_state.read_driver",
        in_run("checkpoints/step_000002/driver.json"),
        lambda path: (refuse_other_schema(path.parent), read_driver(path.parent)),
        max_values=max_values_of("driver.json"),
    )
    yield Format(
        "run: owners/",
        "files.folder_lock",
        in_run(f"{HOME}/00000001"),
        lambda path: owner_is_gone(path.parents[1]),
        never_raises=True,
    )

    def ledger(folder: Path) -> Path:
        events = DrawEvents()
        for number in range(3):
            events.add("drawn", "s", number, number)
        events.add("used", "s", 1)
        events.write(folder / "draws.jsonl", 1, {"s": 3}, 2, 0)
        events.write(folder / "draws.jsonl", 2, {"s": 3}, 2, 0)
        return folder / "draws.jsonl"

    yield Format(
        "run: draws.jsonl", "tracking.draws.account", ledger, lambda path: account(path.parent), max_values=None
    )

    # Without checksums: a mutated line with its checksum would never reach the parser.
    yield Format(
        "run: attempts.journal", "rollout.journal.state", _journal_lines, _read_journal_lines, max_values=LARGE
    )

    def evaluation(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            (folder / "answers.jsonl").write_text(
                "".join(json.dumps({**SAMPLE, "attempt": n}) + "\n" for n in range(3))
            )
            (folder / "config.yaml").write_text(RECIPE)
            measure = {"value": 0.5, "low": 0.1, "high": 0.9, "interval": "wilson"}
            sets = {"heldout": {"problems": 1, "measures": {"accuracy": measure}}}
            (folder / "metrics.json").write_text(json.dumps({"model": "hf", "sets": sets, "metrics": {}}))
            return folder / name

        return make

    for name in ("answers.jsonl", "metrics.json", "config.yaml"):
        yield Format(
            f"evaluation: {name}",
            "report.evaluations",
            evaluation(name),
            lambda path: render_evaluations([read_evaluation(path.parent)]),
            max_values=SMALL if name == "config.yaml" else MEDIUM,
        )


def _journal_lines(folder: Path) -> Path:
    """Write the records of a journal of agents' attempts, one JSON object a line."""

    def completion(reason: FinishReason) -> Completion:
        tokens = np.array([5, 6], np.int64)
        return Completion("r", tokens, np.array([-0.5, -1], np.float32), reason, np.array([2, 3], np.int32))

    def call(identity: str, reason: FinishReason) -> RecordedCall:
        return RecordedCall(np.array([1, 2], np.int32), [completion(reason)], is_done=True, identity=identity)

    agent_try = JournaledTry("s/0#1", "s/0", "settings", first_step=1)
    agent_try.add_answer(0, JournaledAnswer(2, 3, call("c0", "stop"), is_repeatable=True, request="r0", identity="c0"))
    agent_try.add_answer(1, JournaledAnswer(4, 3, None, is_repeatable=False, identity="c1"))
    agent_try.refused = [(1, call("c2", "error"))]
    agent_try.aborted["c3"] = 5
    dropped_try = JournaledTry("s/1#1", "s/1", "settings", first_step=1, dropped_step=2)
    records = [
        JournalState(used_from=0).totals(),
        {"kind": "called", "id": "c4"},
        *agent_try.records(),
        *dropped_try.records(),
        {"kind": "engine_lost", "try": "s/0#1", "tokens": 3, "is_all": True},
        {"kind": "step", "step": 3, "tries": [["s/0#1", 2]]},
        {"kind": "start", "version": 4},
    ]
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _read_journal_lines(path: Path) -> None:
    journal = path.with_name("attempts.journal")
    lines = path.read_bytes().split(b"\n")
    journal.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(line), line) for line in lines if line))
    state = JournalState(used_from=0)
    state.read(journal)
    state.forget_settled(saved_steps=[2])
    state.account()
    for agent_try in state.tries.values():
        list(agent_try.records())


def _rollout_state() -> Iterator[Format]:
    problem = Problem(0, (), (1, 2), "4", source="s")

    def find(source: str, index: int) -> Problem:
        return problem

    def record(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            _record().save(folder)
            return folder / "step_000003" / name

        return make

    for name in ("record.json", "record.safetensors", "recipe.yaml", "chain"):
        yield Format(
            f"record of a step: {name}",
            "rollout.step.step_record",
            record(name),
            lambda path: StepRecord.load(path.parents[1], 3, find),
            max_values=None if name.startswith("record.") else SMALL,
        )

    def state(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            saved = RLState(AlgorithmConfig())
            saved.waiting = [[_trajectory()]]
            saved.draws.add("drawn", "s", 0, 0)
            saved.save(folder)
            return folder / name

        return make

    for name in ("collection.json", "collection.safetensors", "collection_times.json"):
        yield Format(
            f"checkpoint: {name}",
            "rollout.state",
            state(name),
            lambda path: RLState(AlgorithmConfig()).load(path.parent, find),
            # Texts and tokens of all waiting samples.
            max_values=None,
        )


def _trajectory() -> Any:
    from megarl.types import Reward, Segment, Trajectory

    tokens = np.array([1, 2, 5], np.int64)
    mask = np.array([False, False, True])
    segment = Segment(
        tokens, mask, np.array([0, 0, -1], np.float32), np.array([-1, -1, 3], np.int32), np.array([-1, -1, 0], np.int16)
    )
    problem = Problem(0, (), (1, 2), "4", source="s")
    return Trajectory("s", problem, 0, 0, (segment,), Reward(1.0, True, True), texts=("a",), messages=((),))


def _record() -> StepRecord:
    from megarl.rollout.step.rl_batch import RLBatch
    from megarl.rollout.step.step_record import batch_arrays, compute_digests

    groups = [[_trajectory()]]
    batch = RLBatch.from_groups(groups)
    arrays = batch_arrays(batch)
    return StepRecord(
        step=3,
        recipe="name: test\n",
        layout={"tp": 1},
        kl_coefficient=0.1,
        groups=groups,
        waiting=[],
        arrays=arrays,
        digests=compute_digests({"token_ids": batch.token_ids, **arrays}, batch.cu_samples),
        borders=batch.cu_samples,
        metrics={"train/loss": 0.25},
        state={},
    )


def _text(name: str, content: str) -> Callable[[Path], Path]:
    return partial(_written, name, content)


def _written(name: str, content: str, folder: Path) -> Path:
    (folder / name).write_text(content)
    return folder / name
