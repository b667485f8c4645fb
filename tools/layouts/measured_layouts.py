"""Layouts of a small model on two CPU ranks: predicted and measured seconds of a step, and the predicted best.

The prediction is the cost model of `megarl plan --search`, with the measured speeds of a CPU rank in place of a GPU's.
Four constants have no physical probe. They are calibrated on three layouts, and all layouts share them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from megarl.families.shape import ModelShape, shape_from_config
from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.lengths import Lengths, lengths_of_run
from megarl.planner.seconds.rollout import EngineLayout, RolloutCost
from megarl.planner.seconds.step import StepSeconds, Workload, moved_seconds
from megarl.planner.seconds.trainer import Layouts, Recomputed, TrainerCost
from megarl.planner.seconds.work import model_work
from tools.layouts.cpu_speeds import CpuSpeeds, measure
from tools.layouts.least_squares import Numbers, minimise
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, read_metrics, train

RANKS = 2
ITEM_BYTES = 4
"""Bytes of a number: runs on CPU ranks train and sample in float32."""
MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 1024}
"""Sizes of the model: 4 million parameters, so that matrix products take more time than fixed costs."""
PROMPTS, SAMPLES = 8, 8
MAX_NEW_TOKENS = 24
WARM_STEPS = 2
"""Steps of a run that are not measured. Memory is allocated in them."""
STEPS = 6
MOST_RATIO = 1.05
"""Bound on the measured seconds of the predicted best over those of the measured best."""
PHASES = ("rollout", "train", "reshard", "other")
"""Phases of a step. `other` is the rest: advantages, logging, work between the phases."""


class Layout(NamedTuple):
    """Sizes of a trainer on two ranks, of its engines, and tokens of a row (a microbatch)."""

    trainer: str
    """Parallel sizes above one, such as `pp2 vpp2`."""
    engine_tp: int
    row_tokens: int

    @property
    def sizes(self) -> dict[str, int]:
        """Return the trainer's sizes by axis."""
        sizes = {size.rstrip("0123456789"): int(size[-1]) for size in self.trainer.split()}
        return {"tp": 1, "pp": 1, "cp": 1, "vpp": 1, "ep": 1, "etp": 1, "dp": 1} | sizes

    @property
    def name(self) -> str:
        return f"{self.trainer}, engines tp{self.engine_tp}, rows {self.row_tokens}"

    @property
    def overrides(self) -> list[str]:
        """Return the fields of the recipe as command-line overrides."""
        trainer_fields = [f"trainer.{axis}={size}" for axis, size in self.sizes.items() if size > 1 and axis != "dp"]
        return [*trainer_fields, f"rollout.tp={self.engine_tp}", f"trainer.max_tokens_per_microbatch={self.row_tokens}"]


LONG_ROWS, SHORT_ROWS = 2048, 512
LAYOUTS = (
    *(Layout(*at, LONG_ROWS) for at in product(("dp2", "tp2", "pp2", "pp2 vpp2", "cp2"), (1, 2))),
    *(Layout(trainer, 1, SHORT_ROWS) for trainer in ("dp2", "tp2", "pp2", "cp2")),
    Layout("dp2", 2, SHORT_ROWS),
)
CALIBRATING = (Layout("tp2", 1, SHORT_ROWS), Layout("pp2", 2, LONG_ROWS), Layout("dp2", 2, SHORT_ROWS))
"""Layouts whose measured seconds set the constants. Chosen before any run: both engines, both rows, three axes."""


class Calibrated(NamedTuple):
    """Constants without a physical probe."""

    gemm_efficiency: float
    """Share of the probe's FLOPs that passes reach. Norms and activations, whose time grows with the tokens, lower
    it."""
    layer_seconds: float
    """Seconds of a layer's forward pass over a row besides matrix products."""
    engine_step_seconds: float
    """Seconds of a decoding step besides the model: scheduler, sampling."""
    other_seconds: float
    """Seconds of a step outside its phases."""


EXPECTED = Calibrated(0.5, 1e-3, 5e-3, 0.05)
"""Expected values before calibration, by order of magnitude."""
_SPREAD = 1.5
"""Standard deviation of a calibrated constant's logarithm around its expected value: a factor of 4.5."""
_ERROR = 0.15
"""Standard deviation of the logarithm of a measured time around its prediction."""


@dataclass(frozen=True)
class Machine:
    """Everything that predictions need except the calibrated constants."""

    shape: ModelShape
    speeds: CpuSpeeds
    lengths: Lengths

    def predict(self, layout: Layout, calibrated: Calibrated) -> StepSeconds:
        """Return the predicted seconds of a step in a layout."""
        work, speeds = model_work(self.shape), self.speeds
        rank = GpuSpeeds(
            flops=speeds.flops, memory=speeds.memory, memory_bytes=math.inf, nvlink=speeds.link, network=speeds.link
        )
        constants = _constants(speeds, calibrated)
        load = Workload(
            lengths=self.lengths,
            num_prompts=PROMPTS,
            samples_per_prompt=SAMPLES,
            updates=1,
            scoring_passes=0,
        )
        layouts = Layouts.of(layout.sizes)
        no_recomputation = np.zeros(1)
        trainer = TrainerCost(
            work=work,
            gpu=rank,
            constants=constants,
            score_flops=work.score_flops(load.lengths.sequences),
            item_bytes=ITEM_BYTES,
        )
        update = trainer.update_seconds(
            layouts,
            Recomputed(attention=no_recomputation, feed_forward=no_recomputation),
            tokens=load.tokens,
            updates=load.updates,
            row_tokens=np.array([float(layout.row_tokens)]),
        )
        engines = EngineLayout(
            tp=layout.engine_tp,
            num_engines=RANKS // layout.engine_tp,
            max_requests=load.num_samples,
            cache_tokens=math.inf,
        )
        rollout = RolloutCost(
            work=work,
            gpu=rank,
            constants=constants,
            item_bytes=ITEM_BYTES,
            activation_bytes=ITEM_BYTES,
            cache_item_bytes=ITEM_BYTES,
        )
        sampled = rollout.rollout_seconds(
            engines, load.lengths, num_samples=load.num_samples, samples_per_prompt=load.samples_per_prompt
        )
        shard = ITEM_BYTES * work.weights / layout.engine_tp
        return StepSeconds(
            rollout=sampled.seconds,
            logprobs=0.0,
            train=float(update.seconds[0]),
            reshard=moved_seconds(shard, link=speeds.link, memory=speeds.memory),
            other=calibrated.other_seconds,
        )

    def calibrate(self, measured: Mapping[Layout, Mapping[str, float]]) -> Calibrated:
        """Return the constants fitted to the rollout, train and other seconds of the calibrating layouts."""
        expected = np.log(EXPECTED)

        def residuals(values: Numbers) -> Numbers:
            calibrated = Calibrated(*np.exp(values).tolist())
            deviations = [
                math.log(getattr(predicted, phase) / max(measured[layout][phase], 1e-4)) / _ERROR
                for layout in CALIBRATING
                for predicted in [self.predict(layout, calibrated)]
                for phase in ("rollout", "train", "other")
            ]
            return np.append(deviations, (values - expected) / _SPREAD)

        return Calibrated(*np.exp(minimise(residuals, expected)).tolist())


def _constants(speeds: CpuSpeeds, calibrated: Calibrated) -> Constants:
    """Return the constants of the cost model. Bandwidths were measured, not taken from a data sheet: they count
    whole."""
    return Constants(
        gemm_efficiency=calibrated.gemm_efficiency,
        half_tokens=speeds.half_tokens,
        expert_half_tokens=speeds.half_tokens,
        layer_seconds=calibrated.layer_seconds,
        expert_layer_seconds=calibrated.layer_seconds,
        link_efficiency=1.0,
        decode_bandwidth=1.0,
        # One model is measured, so the fixed time of its layers is part of that of the engine's step.
        decode_layer_seconds=0.0,
        decode_expert_layer_seconds=0.0,
        reduce_seconds=speeds.latency,
        network_reduce_seconds=speeds.latency,
        engine_step_seconds=calibrated.engine_step_seconds,
        blackwell_efficiency=1.0,
        grace_seconds=1.0,
        # Already part of the calibrated other seconds.
        sample_seconds=0.0,
    )


def make_inputs(folder: Path) -> ModelShape:
    """Write model, data, reward and recipe into a folder. Returns the model's shape."""
    make_tiny_model(folder / "model", **MODEL)
    make_dataset(folder / "data", train=512, heldout=8, sft=8)
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)
    recipe = {
        "name": "run", "loop": "rl", "samples_with_tokens": 0,
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "data/train.jsonl", "max_prompt_tokens": 48},
        "cluster": {"ranks_per_node": RANKS, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-5},
        "rollout": {"kv_cache_gib": 0.25, "sampling": {"max_new_tokens": MAX_NEW_TOKENS}},
        "reward": {"functions": ["share_of_digits:digits"]},
        "train": {"steps": STEPS, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
    }  # fmt: skip
    # YAML includes JSON.
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return shape_from_config(json.loads((folder / "model/config.json").read_text(encoding="utf-8")))


def run_layouts(folder: Path, rounds: int) -> dict[Layout, list[Path]]:
    """Train every layout once a round, in a folder of `make_inputs`. Returns the folders of its runs.

    Every other round goes backwards, so that a drift of the machine's speed affects all layouts alike.
    """
    folders: dict[Layout, list[Path]] = {layout: [] for layout in LAYOUTS}
    for number in range(rounds):
        for place, layout in enumerate(LAYOUTS[:: -1 if number % 2 else 1]):
            name = f"round{number}_{place:02}"
            seconds = train("recipe.yaml", f"name={name}", *layout.overrides, folder=folder)
            print(f"round {number + 1}, {layout.name}: ran for {seconds:.0f} s", file=sys.stderr, flush=True)
            folders[layout].append(folder / "runs" / name)
    return folders


def phase_seconds(runs: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return the median seconds of a step and its phases, over the measured steps of runs with these metrics."""
    # The row of step 0 is the start.
    rows = [row for run in runs for row in run if row["step"] > WARM_STEPS]

    def phases(row: Mapping[str, float]) -> dict[str, float]:
        phase_values = {phase: row.get(f"time/{phase}_seconds", 0.0) for phase in PHASES if phase != "other"}
        step = row["time/step_seconds"]
        return phase_values | {"other": step - sum(phase_values.values()), "step": step}

    split = [phases(row) for row in rows]
    return {name: median(row[name] for row in split) for name in ("step", *PHASES)}


def table(machine: Machine, measured: Mapping[Layout, Mapping[str, float]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layout, fastest prediction first, then the constants, the errors and the verdict.

    The verdict is not met if the layout with the lowest prediction took 5 % more time than the fastest one.
    """
    calibrated = machine.calibrate(measured)
    predicted = {layout: machine.predict(layout, calibrated) for layout in measured}
    order = sorted(measured, key=lambda layout: predicted[layout].step)
    for layout in order:
        row: dict[str, Any] = {"layout": layout.name, "calibrating": "yes" if layout in CALIBRATING else "no"}
        for phase in ("step", *PHASES):
            row[f"{phase}_predicted"] = getattr(predicted[layout], phase)
            row[phase] = measured[layout][phase]
        yield row
    yield {"layout": f"speeds: {_format_values(machine.speeds)}", **machine.speeds._asdict()}
    yield {"layout": f"calibrated: {_format_values(calibrated)}", **calibrated._asdict()}
    errors = [
        abs(predicted[layout].step / measured[layout]["step"] - 1) for layout in measured if layout not in CALIBRATING
    ]
    yield {
        "layout": f"median error of the {len(errors)} layouts not calibrating: {median(errors):.1%}",
        "median_error": median(errors),
    }
    pick, best = order[0], min(measured, key=lambda layout: measured[layout]["step"])
    ratio = measured[pick]["step"] / measured[best]["step"]
    near = sum(seconds["step"] <= MOST_RATIO * measured[best]["step"] for seconds in measured.values())
    text = f"pick {pick.name}: {ratio:.3f} times the best, {best.name}"
    yield {
        "layout": f"{text}; {near} of {len(measured)} are within 5 %",
        "pick": pick.name,
        "best": best.name,
        "ratio": ratio,
        "within_bound": near,
        "met": ratio <= MOST_RATIO,
    }


def _format_values(values: CpuSpeeds | Calibrated) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values._asdict().items())


def measure_layouts(rounds: int) -> Iterator[dict[str, Any]]:
    """Probe the machine, train all layouts and yield the rows of the table."""
    with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as scratch:
        folder = Path(scratch)
        shape = make_inputs(folder)
        # Rows are filled unevenly: half of a long one is between both lengths.
        message_bytes = LONG_ROWS // 2 * shape.hidden_size * ITEM_BYTES
        speeds = measure(
            hidden_size=shape.hidden_size,
            intermediate_size=MODEL["intermediate_size"],
            message_bytes=message_bytes,
        )
        runs = run_layouts(folder, rounds)
        measured = {
            layout: phase_seconds([read_metrics(run) for run in run_folders]) for layout, run_folders in runs.items()
        }
        # The prompts' mean is read from the run.
        lengths = lengths_of_run(runs[CALIBRATING[0]][0], limit=MAX_NEW_TOKENS, prompt_tokens=math.nan)
        yield from table(Machine(shape, speeds, lengths), measured)
