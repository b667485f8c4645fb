"""lm-evaluation-harness reads an exported model and answers as `megarl eval` does.

    python tools/check.py lm_eval RUN_OR_MODEL RECIPE [--set NAME] [--limit 64] [--venv FOLDER]

The harness is installed, from the package index, into a virtual environment of its own in FOLDER, which may be there
from before; torch and transformers are this environment's. A set of the recipe becomes a local task of the harness:
greedy answers by transformers, with the model's chat template, and the last \\boxed{} compared as text. A row fails if
fewer than --least-equal of the answers are the same text as those of megarl's engine, or are judged alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.runs import make_environment, read_lines

DURATION = {"full": "65 s, with the download of lm-eval"}
SMALL: dict[str, Any] = {}
HARNESS = "lm-eval[hf]==0.4.13"
TASK = """
task: megarl_check
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|im_end|>"], do_sample: false, max_gen_toks: {max_new_tokens}}}
filter_list:
- name: boxed
  filter:
  - {{function: regex, regex_pattern: '\\\\boxed\\{{([^{{}}]*)\\}}', group_select: -1}}
  - {{function: take_first}}
metric_list:
- {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


def by_megarl(model: Path, recipe: Path, name: str, limit: int, out: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Evaluate with megarl. Returns the evaluation, and a record for each greedy answer of a set."""
    from megarl.loops.commands.evaluation import prepare, run

    overrides = [f"evaluation.max_problems={limit}"]
    options = {"samples_per_prompt": 1, "k": [], "sampling.temperature": 0.0}
    evaluation = prepare(model, recipe, overrides, options=options, sets=[name], out=out)
    [evaluated_set] = asyncio.run(run(evaluation))
    return evaluation, evaluated_set.records()


def by_harness(python: Path, model: Path, records: Sequence[Any], max_new_tokens: int, folder: Path) -> list[Any]:
    """Evaluate the same problems with the harness. Returns its record for each."""
    data, system = folder / "data.jsonl", ""
    with data.open("w") as file:
        for record in records:
            *before, question = record["prompt"]
            if [message["role"] for message in before] not in ([], ["system"]):
                sys.exit("problems of several turns are no task of the harness")
            system = before[0]["content"] if before else ""
            file.write(json.dumps({"question": question["content"], "answer": record["answer"]}) + "\n")
    (folder / "task.yaml").write_text(TASK.format(data=data, max_new_tokens=max_new_tokens))
    command = [
        python, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model.absolute()},dtype=float32",
        "--tasks", "megarl_check", "--include_path", folder, "--apply_chat_template", "--device", "cpu",
        "--batch_size", "16", "--output_path", folder / "harness", "--log_samples",
    ]  # fmt: skip
    command += ["--system_instruction", system] if system else []
    caches = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(list(map(str, command)), check=True, env=os.environ | caches)
    [samples] = (folder / "harness").rglob("samples_megarl_check_*.jsonl")
    return sorted(read_lines(samples), key=lambda sample: sample["doc_id"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", default="heldout")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--least-equal", type=float, default=0.95)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(prefix="megarl_lm_eval_") as temporary:
        folder = Path(temporary)
        python = make_environment(options.venv or folder / "venv", [HARNESS], shares_packages=True)
        evaluation, ours = by_megarl(options.model, options.recipe, options.set, options.limit, folder / "megarl")
        max_new_tokens = evaluation.recipe.evaluation_sampling.max_new_tokens
        theirs = by_harness(python, evaluation.model, ours, max_new_tokens, folder)
    pairs = list(zip(ours, theirs, strict=True))
    same_text = sum(
        our_record["completion"].strip() == their_record["resps"][0][0].strip() for our_record, their_record in pairs
    ) / len(pairs)
    same_verdict = sum(
        our_record["answer_correct"] == bool(their_record["exact_match"]) for our_record, their_record in pairs
    ) / len(pairs)
    yield {
        "problems": len(pairs),
        "accuracy_megarl": sum(our_record["answer_correct"] for our_record in ours) / len(ours),
        "accuracy_lm_eval": sum(their_record["exact_match"] for their_record in theirs) / len(theirs),
        "same_text": same_text,
        "same_verdict": same_verdict,
        "met": min(same_text, same_verdict) >= options.least_equal,
    }
