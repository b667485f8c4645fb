"""The cost model of a training step, fitted to published steps, predicts the steps held out.

Rows are the steps in tools/bench/results/published_steps.json. A third is held out: whole groups of one model in one
system, chosen by a hash. Constants are fitted to the others, together with the weight updates of these systems. Each
row shows its measured and predicted seconds, by the formula of `megarl plan --search`. The check fails if constants or
error in `megarl.planner.seconds.constants` are not those found here.

With --measure, steps of layouts on two CPU ranks are measured and predicted instead. Three layouts calibrate four
constants. The check fails if the layout with the lowest prediction is more than 5 % slower than the fastest one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.families.published import PUBLISHED
from megarl.families.shape import ModelShape, shape_from_config
from megarl.planner.seconds.constants import FITTED, HELD_OUT_ERROR, PRIOR, Constants
from megarl.planner.seconds.gpus import GPUS
from megarl.planner.seconds.lengths import Lengths, log_normal
from megarl.planner.seconds.rollout import EngineLayout, RolloutCost
from megarl.planner.seconds.step import StepSeconds, Workload, reshard_seconds
from megarl.planner.seconds.trainer import Layouts, Recomputed, TrainerCost
from megarl.planner.seconds.work import model_work
from tools.layouts.least_squares import minimise
from tools.layouts.measured_layouts import LAYOUTS, measure_layouts

DURATION = {"full": "3 s; with --measure 4 minutes a round: 15 runs on quiet cores"}
SMALL: dict[str, Any] = {}

ROWS = Path(__file__).resolve().parents[1] / "bench/results/published_steps.json"
HELD_OUT_SHARE = 1 / 3
_STATED_TOLERANCE = 0.3
"""Percentage points between the stated and the found median error. The fit's end depends on rounding."""
_CONSTANT_TOLERANCE = 0.01
_NAMES = [field.name for field in fields(Constants)]
_SPREAD = {
    "gemm_efficiency": 0.15,
    "link_efficiency": 0.3,
    "decode_bandwidth": 0.25,
    "blackwell_efficiency": 0.3,
    "grace_seconds": 0.5,
}
"""Standard deviation of a constant's logarithm around its expected value. Others: `_WIDE`."""
_WIDE = 0.7
_ERROR = 0.15
"""Standard deviation of the logarithm of a measured time around its prediction."""
REFIT = (2.0, 25e9, 50e9)
"""Expected weight update of the published systems: fixed seconds and model bytes per second if colocated, bytes per
second to separate engines. Orders of magnitude only: half of PCIe's bandwidth, and one network card's. These systems
gather whole tensors, and megarl does not. So the times are fitted next to the constants, and are no part of them."""


@cache
def read_rows() -> tuple[Mapping[str, Any], ...]:
    """Return the rows of the data file."""
    return tuple(json.loads(ROWS.read_text(encoding="utf-8"))["rows"])


@cache
def shape_of(model: str) -> ModelShape:
    """Return the shape of a row's model."""
    shapes = json.loads(ROWS.read_text(encoding="utf-8"))["models"]
    return shape_from_config(dict(shapes[model] if model in shapes else PUBLISHED[model]))


def _group(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the system and the model of a row. Rows of one group are alike, so they are held out together."""
    return row["id"].partition(" ")[0].partition("-")[0], row["model"]


def held_out() -> frozenset[str]:
    """Return the names of the held-out rows: of the groups with the smallest SHA-256, up to a third of all rows.

    Expected constants were measured in megarl's own rows, so these are fitted.
    """
    groups = {_group(row) for row in read_rows() if not row["id"].startswith("megarl")}
    names: list[str] = []
    for group in sorted(groups, key=lambda group: hashlib.sha256(" ".join(group).encode()).hexdigest()):
        row_names = [row["id"] for row in read_rows() if _group(row) == group]
        if len(names) + len(row_names) <= round(len(read_rows()) * HELD_OUT_SHARE):
            names += row_names
    return frozenset(names)


@cache
def _lengths_of(*, mean: float, limit: int, prompt: float) -> Lengths:
    return log_normal(mean=mean, limit=limit, prompt_tokens=prompt)


def predict(row: Mapping[str, Any], constants: Constants, refit: Sequence[float] | None = None) -> dict[str, float]:
    """Return the predicted values of a row, by the names of its measured ones. Times are in seconds.

    `refit`: three numbers like `REFIT` for the weight update of the published system. None: megarl's reshard, as in the
    search.
    """
    work, gpu = model_work(shape_of(row["model"])), GPUS[row["gpu"]]
    constants = constants.for_gpu(gpu)
    load = Workload(
        lengths=_lengths_of(mean=row["mean_tokens"], limit=row["max_tokens"], prompt=row["prompt_tokens"]),
        num_prompts=row["prompts"],
        samples_per_prompt=row["samples"] // row["prompts"],
        updates=row["updates"],
        scoring_passes=row["scoring_passes"],
        staleness=row["staleness"],
    )
    trainers = row["gpus"] - row["engine_gpus"]
    dp = trainers // (row["tp"] * row["cp"] * row["pp"])
    layouts = Layouts.of({axis: row[axis] for axis in ("tp", "pp", "cp", "ep")} | {"dp": dp})
    score_flops = work.score_flops(load.lengths.sequences)
    trainer = TrainerCost(work=work, gpu=gpu, constants=constants, score_flops=score_flops)
    recomputed_share = np.array([float(row["recompute"] == "full")])
    update = trainer.update_seconds(
        layouts,
        Recomputed(attention=recomputed_share, feed_forward=recomputed_share),
        tokens=load.tokens,
        updates=load.updates,
        row_tokens=np.array([float(row["row_tokens"])]),
        # megarl's own rows were measured before it could keep logits.
        keeps_logits=not row["id"].startswith("megarl"),
    )
    train = float(update.seconds[0])
    scoring = trainer.scoring_seconds(
        layouts, tokens=load.tokens, row_tokens=np.array([float(row["forward_row_tokens"])])
    )
    engines = _engines(row, gpu.memory_bytes)
    cost = RolloutCost(work=work, gpu=gpu, constants=constants)
    if row["staleness"]:
        sampled = cost.steady_seconds(
            engines,
            load.lengths,
            num_samples=load.num_samples,
            samples_per_prompt=load.samples_per_prompt,
            staleness=load.staleness,
        )
    else:
        sampled = cost.rollout_seconds(
            engines, load.lengths, num_samples=load.num_samples, samples_per_prompt=load.samples_per_prompt
        )
    is_separate = bool(row["engine_gpus"])
    weights = 2 * work.weights
    reshard = reshard_seconds(work, row["rollout_tp"], gpu, is_separate=is_separate)
    if refit is not None:
        reshard = weights / refit[2] if is_separate else refit[0] + weights / refit[1]
    step = StepSeconds(
        rollout=sampled.seconds,
        logprobs=float(scoring.seconds[0]) * load.scoring_passes,
        train=train,
        reshard=reshard,
        other=constants.sample_seconds * load.num_samples,
        is_concurrent=row["staleness"] > 0,
    )
    flops = work.layer_flops + work.expert_flops + work.head_flops + trainer.score_flops
    mfu = 3 * flops * load.tokens / (train * trainers * gpu.flops)
    seconds = asdict(step) | {"step": step.step, "train_mfu": mfu}
    return {name: seconds[name] for name in row["measured"]}


def _engines(row: Mapping[str, Any], memory_bytes: float) -> EngineLayout:
    """Return the engines of a row, with the KV cache that vLLM's share of the memory leaves."""
    shape, tp = shape_of(row["model"]), row["rollout_tp"]
    work = model_work(shape)
    # 2 GB: activations of a prefill, and CUDA graphs.
    cache_bytes = row["gpu_memory_utilization"] * memory_bytes - 2 * work.weights / tp - 2e9
    token = 2 * shape.attention.cached_numbers(tp) * work.num_layers
    return EngineLayout(
        tp=tp,
        num_engines=(row["engine_gpus"] or row["gpus"]) // tp,
        max_requests=row["max_requests"],
        cache_tokens=max(cache_bytes / token, row["max_tokens"]),
    )


def residuals(rows: Iterable[Mapping[str, Any]], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithms of predicted over measured values in standard deviations, and those of the constants
    around their expected values [rows' values + constants]. `values` are logarithms of constants and refit."""
    constants = Constants(**dict(zip(_NAMES, np.exp(values[: len(_NAMES)]).tolist(), strict=True)))
    refit = np.exp(values[len(_NAMES) :]).tolist()
    deviations = []
    for row in rows:
        predicted = predict(row, constants, refit)
        # A row counts once, however many phases it has.
        weight = 1 / (_ERROR * math.sqrt(len(predicted)))
        deviations += [weight * math.log(value / row["measured"][name]) for name, value in predicted.items()]
    spread = np.array([_SPREAD.get(name, _WIDE) for name in _NAMES] + [_WIDE] * len(refit))
    return np.append(deviations, (values - _expected_values()) / spread)


def _expected_values() -> NDArray[np.float64]:
    return np.log([*(getattr(PRIOR, name) for name in _NAMES), *REFIT])


def fit(rows: Sequence[Mapping[str, Any]]) -> tuple[Constants, list[float]]:
    """Return the constants fitted to rows by damped least squares, and the refit's three constants."""
    values = minimise(lambda tried: residuals(rows, tried), _expected_values())
    constants = np.exp(values).tolist()
    return Constants(**dict(zip(_NAMES, constants[: len(_NAMES)], strict=True))), constants[len(_NAMES) :]


def split() -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the rows that are fitted, and those held out."""
    out = held_out()
    rows = read_rows()
    return [row for row in rows if row["id"] not in out], [row for row in rows if row["id"] in out]


def errors(
    rows: Iterable[Mapping[str, Any]], constants: Constants, refit: Sequence[float] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a line for each row: measured and predicted value, and the relative error. Rows with a step show it.

    `refit` as in `predict`.
    """
    for row in rows:
        name = "step" if "step" in row["measured"] else next(iter(row["measured"]))
        predicted = predict(row, constants, refit)
        measured = row["measured"][name]
        phases = " ".join(
            f"{phase} {value:.3g}/{row['measured'][phase]:.3g}" for phase, value in predicted.items() if phase != name
        )
        yield {
            "row": row["id"],
            "value": name,
            "measured": float(measured),
            "predicted": float(predicted[name]),
            "error_percent": 100 * (predicted[name] / measured - 1),
            "phases": phases,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print-constants", action="store_true", help="print the fitted constants as Python code")
    parser.add_argument(
        "--measure", action="store_true", help=f"measure {len(LAYOUTS)} layouts on two CPU ranks instead of the fit"
    )
    parser.add_argument("--rounds", type=int, default=1, help="with --measure: runs of each layout")


def run(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    if options.measure:
        yield from measure_layouts(options.rounds)
        return
    fitted, out = split()
    constants, refit = fit(fitted)
    if options.print_constants:
        print(",\n".join(f"    {name}={getattr(constants, name):.4g}" for name in _NAMES))
    for kind, rows in (("fitted", fitted), ("held out", out)):
        row_errors = list(errors(rows, constants))
        for line in row_errors:
            yield {"set": kind, **line}
        middle = median(abs(line["error_percent"]) for line in row_errors)
        is_met = abs(middle - 100 * HELD_OUT_ERROR) <= _STATED_TOLERANCE if kind == "held out" else None
        yield {"set": kind, "row": "median of absolute errors", "error_percent": middle, "met": is_met}
        middle = median(abs(line["error_percent"]) for line in errors(rows, constants, refit))
        yield {"set": kind, "row": "median with the systems' own weight updates", "error_percent": middle, "met": None}
    changed = [
        name for name in _NAMES if abs(getattr(FITTED, name) / getattr(constants, name) - 1) > _CONSTANT_TOLERANCE
    ]
    yield {"set": "constants", "row": f"differ from the fit: {', '.join(changed) or 'none'}", "met": not changed}
