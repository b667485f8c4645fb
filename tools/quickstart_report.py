"""Show what a quickstart did: accuracies, times, where to look, and three answers of the exported model.

    python tools/quickstart_report.py --sft runs/quickstart_sft --grpo runs/quickstart

The answers come from transformers alone, on the exported folder: what was trained is an ordinary model.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import megarl
from megarl.files.shipped import is_clone
from megarl.terminal import Console


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of a run, one record a step, each without the metrics that its step lacks."""
    rows = megarl.load_run(run).metrics().to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def accuracies(steps: list[dict[str, float]]) -> list[float]:
    """Held-out accuracy at each evaluation, in order."""
    return [value for step in steps for name, value in step.items() if re.fullmatch("val/[^/]+/accuracy", name)]


def phase_seconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds by phase over a run. Time outside of phases is `other`."""
    phases = ("start", "rollout", "logprobs", "train", "reshard", "evaluation")
    seconds: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for phase in phases:
            seconds[phase] += step.get(f"time/{phase}_seconds", 0.0)
        seconds["other"] += step["time/step_seconds"]
    seconds["other"] -= sum(seconds[phase] for phase in phases)
    return seconds


def answer(model_folder: Path, prompts: list[str], max_new_tokens: int = 64) -> list[str]:
    """Return greedy answers of an exported model, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    answers = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", type=Path, default=Path("runs/quickstart_sft"), help="run folder of the warm-up")
    parser.add_argument("--grpo", type=Path, default=Path("runs/quickstart"), help="run folder of the GRPO run")
    parser.add_argument("--heldout", type=Path, default=Path("runs/quickstart_input/data/heldout.jsonl"))
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    sft, grpo = read_metrics(arguments.sft), read_metrics(arguments.grpo)

    table = Table(
        title="held-out accuracy, greedy", title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
    for column in ("before SFT", "after SFT", "after GRPO"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{value:.3f}" for value in (accuracies(sft)[0], accuracies(sft)[-1], accuracies(grpo)[-1])))
    console.print(table)

    table = Table(title="seconds by phase", title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("run")
    runs = {"SFT": phase_seconds(sft), "GRPO": phase_seconds(grpo)}
    for phase in [*runs["GRPO"], "all"]:
        table.add_column(phase, justify="right")
    for name, seconds in runs.items():
        table.add_row(name, *(f"{value:.1f}" for value in [*seconds.values(), sum(seconds.values())]))
    console.print(table)

    with arguments.heldout.open(encoding="utf-8") as file:
        records = [json.loads(next(file)) for _ in range(3)]
    questions = [record["messages"]["content"] for record in records]
    console.print("three held-out problems, answered by transformers from the exported model")
    for record, question, completion in zip(records, questions, answer(arguments.grpo / "hf", questions), strict=True):
        console.print(f"  {question!r}\n    -> {completion!r} (gold {record['gt_answer']})", markup=False)
    programs = ".venv/bin/" if is_clone() else ""
    console.print(
        f"\nreport:  {programs}megarl report {arguments.grpo}\n"
        f"samples: {programs}megarl samples {arguments.grpo}\n"
        f"curves:  {programs}tensorboard --logdir {arguments.grpo.parent}\n"
        f"model:   {arguments.grpo}/hf/",
        markup=False,
    )


if __name__ == "__main__":
    main()
