"""Whole steps, profiled rollouts, and the driver against `vllm.LLM`, in one start of megarl. Items of `gpu_quarter.py`.

The run is that of `grpo_gpu.py`. Between its steps the trainer's offload and recomputation change. The rollouts
afterwards use its engine and its driver.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.loops.started_run import Run
from megarl.planner.predictions import predicted_memory
from megarl.types import Request, SamplingSettings
from tools.bench.grpo_gpu import PROMPT_TOKENS, step_line, write_inputs
from tools.bench.measured.measured_run import run_measured, train_by_plan
from tools.bench.measured.run_plan import PLAN, Settings, clean_steps
from tools.bench.measured.traces import summary_of
from tools.bench.parts.budget import Budget
from tools.bench.parts.driven_engine import problems_of, sampler_of
from tools.bench.parts.shapes import config_of, stop_tokens
from tools.bench.quarter.bare_llm import SHARE_OF_GPU, BareLlm
from tools.bench.quarter.item_lines import START_TIMEOUT_SECONDS, ItemLines, Options, engine_settings, options_of
from tools.bench.quarter.quarter_sizes import Size

PHASES = ("rollout", "logprobs", "train", "reshard")


class RunItems:
    """The measurements of one run."""

    def __init__(self, options: Options, lines: ItemLines) -> None:
        self._options, self._size, self._lines = options, options.size, lines
        self._started = time.monotonic()
        self._wants_steps = lines.wants("whole_steps")
        self._steps: list[dict[str, Any]] = []
        self._run: Run
        self.is_complete = False

    async def loop(self, run: Run) -> None:
        """Make the steps, then the rollouts. In place of the loop of `loop: rl`."""
        self._run = run
        plan = PLAN if self._wants_steps else ()
        if self._wants_steps:
            self._lines.begin("whole_steps")
        start = time.monotonic() - self._started
        self._lines.write("start_seconds", [start], "s", against="checks, ranks, engine and model")
        await train_by_plan(run, self._size.gemm_width, plan, self._write_step, self._after_steps)

    def _write_step(self, number: int) -> None:
        """Write the line of a step that has just ended, from the last line of the run's metrics."""
        row = json.loads(self._run.folder.metrics_file.read_text(encoding="utf-8").splitlines()[-1])
        settings, line = PLAN[number - 1], step_line(row)
        predicted = self._predicted(settings)
        for phase, memory in line["memory"].items():
            memory["predicted_gib"] = round(predicted[phase] / 2**30, 3)
        self._steps.append(line)
        self._lines.write_line({"settings": settings.name, "is_clean": number in clean_steps(PLAN), **line})

    def _predicted(self, settings: Settings) -> Mapping[str, int]:
        """Return the planned memory of each phase with these settings."""
        recipe = self._run.recipe
        changes = {"offload": settings.offload, "recompute": settings.recompute}
        trainer = recipe.trainer.model_copy(update=changes)
        return predicted_memory(recipe.model_copy(update={"trainer": trainer}))

    async def _after_steps(self, run: Run) -> None:
        if self._wants_steps:
            with self._lines.measuring("whole_steps"):
                self._write_whole_steps()
        if self._lines.wants("profiled_rollouts"):
            with self._lines.measuring("profiled_rollouts"):
                for requests in self._size.profile_requests:
                    await self._profile_rollout(requests)
        if self._lines.wants("driver_and_vllm"):
            with self._lines.measuring("driver_and_vllm"):
                await self._compare_driver()
        self.is_complete = True

    def _write_whole_steps(self) -> None:
        """Write the first step over the second, then the metrics of all clean steps with the same settings."""
        first, second = (step["step_seconds"] for step in self._steps[:2])
        self._lines.write(
            "first_step", [first / second], "of the second step", against=f"the same settings, {PLAN[0].name}"
        )
        numbers = clean_steps(PLAN)
        for settings in dict.fromkeys(PLAN):
            steps = [self._steps[number - 1] for number in numbers if PLAN[number - 1] == settings]
            name = settings.name
            self._lines.write(f"step_seconds_{name}", [step["step_seconds"] for step in steps], "s")
            for phase in PHASES:
                self._lines.write(f"{phase}_seconds_{name}", [step["phases"].get(phase, 0.0) for step in steps], "s")
            switch = [step["step_seconds"] - sum(step["phases"].values()) for step in steps]
            self._lines.write(f"other_seconds_{name}", switch, "s", against="the step without its phases")
            for field, unit, against in (
                ("of_gemm", "of GEMM", "updates and log-probs; products on the rank before the step"),
                ("gpu_busy", "share of time", "nvidia-smi"),
                ("steps_ahead", "share of steps", "engine steps begun before the one before was read"),
            ):
                if values := [step[field] for step in steps if step[field] is not None]:
                    self._lines.write(f"{field}_{name}", values, unit, against=against)
            for phase in steps[-1]["memory"]:
                memories = [step["memory"][phase] for step in steps]
                shares = [memory["measured_gib"] / memory["predicted_gib"] for memory in memories]
                gib = [memory["measured_gib"] for memory in memories]
                against = "the memory plan of these settings"
                self._lines.write(f"{phase}_memory_{name}", shares, "of plan", against=against, measured_gib=gib)

    async def _sample(self, num_requests: int, sampling: SamplingSettings, seed: str) -> float:
        """Sample one turn of `num_requests` problems with the run's driver. Returns the seconds."""
        run = self._run
        sampler = sampler_of(run.pool, run.data.tokenizer, 1, max_prompt_tokens=PROMPT_TOKENS)
        problems = problems_of(run.data.tokenizer, num_requests)
        await self._on_rank("begin_round")
        started = time.monotonic()
        await sampler.sample(problems, sampling, seed=seed)
        return time.monotonic() - started

    async def _on_rank(self, method: str, *arguments: Any) -> Any:
        [answer, *_] = await self._run.ranks.trainers.call(method, *arguments)
        return answer

    async def _profile_rollout(self, num_requests: int) -> None:
        """Write the time of an engine step with `num_requests` requests, its floor by memory reads, and a profile."""
        size, ranks = self._size, self._run.ranks
        sampling = SamplingSettings(size.profile_tokens)
        milliseconds, step_counts = [], []
        for number in range(size.rounds + 1):
            seconds = await self._sample(num_requests, sampling, f"decode {number}")
            step_counts.append(await self._on_rank("round_steps"))
            milliseconds.append(1000 * seconds / max(1, step_counts[-1]))
        rates = await self._on_rank("copy_rates", size.copy_bytes // 8, size.rounds)
        floor = 1000 * decode_bytes(size.run_shape, num_requests, size.profile_tokens) / statistics.median(rates) / 1e9
        name, write = f"{num_requests}_requests", self._lines.write
        write(f"copy_{name}", rates, "GB/s read and written")
        # The first round warms up.
        write(f"step_ms_{name}", milliseconds[1:], "ms", against="with the driver", engine_steps=step_counts[1:])
        shares = [floor / value for value in milliseconds[1:]]
        write(f"step_of_copy_{name}", shares, "of a copy", against="a copy's time of weights and cache", floor_ms=floor)
        await ranks.call("__profile__", ["torch"])
        seconds = await self._sample(num_requests, sampling, "profiled")
        folder = self._options.work / f"profiles/{name}"
        [file, *_] = await ranks.call_with_first_rank("__profile_end__", folder)
        summary = summary_of(folder / file[0])
        if summary["gpu_busy_share"] is not None:
            write(f"gpu_busy_{name}", [summary["gpu_busy_share"]], "share of time", against="a profiled rollout")
        write(f"profiled_seconds_{name}", [seconds], "s", profile=summary)

    async def _compare_driver(self) -> None:
        """Write tokens a second of the driver and of `vllm.LLM`, alternating, on the same requests."""
        size, is_cpu = self._size, self._options.device == "cpu"
        recipe = self._run.recipe
        stops = tuple(stop_tokens(config_of(size.run_shape)["vocab_size"], size.mean_tokens))
        sampling = SamplingSettings(size.driver_new_tokens, stop_token_ids=stops)
        settings: dict[str, Any] = {
            "dtype": recipe.model.dtype,
            "max_model_len": PROMPT_TOKENS + size.new_tokens,
            "kv_cache_memory_bytes": int(size.kv_cache_gib * 2**30),
            **engine_settings(),
            **size.vllm_limits,
            **({} if is_cpu else {"gpu_memory_utilization": SHARE_OF_GPU}),
        }
        rates: dict[str, list[float]] = {"driven": [], "bare": []}
        log = self._options.work / "bare_llm.log"
        with BareLlm(Path(recipe.model.path), settings, log, is_cpu=is_cpu) as llm:
            self._lines.write("vllm_start_seconds", [llm.start_seconds()], "s")
            requests: list[Request] = []
            for number in range(size.rounds + 1):
                # By turns the one and the other first. The requests are the same in each round.
                order = ("driven", "bare") if number % 2 == 0 else ("bare", "driven")
                round_of: dict[str, tuple[float, list[int]]] = {}
                for kind in order:
                    if kind == "bare":
                        round_of[kind] = llm.sample(requests)
                        continue
                    seconds = await self._sample(size.driver_requests, sampling, "compared")
                    requests = await self._on_rank("round_requests")
                    round_of[kind] = seconds, await self._on_rank("round_tokens")
                for kind, (seconds, tokens) in round_of.items():
                    rates[kind].append(sum(tokens) / seconds)
                self._lines.write_line({"round": number, "warms_up": number == 0, **round_line(round_of)})
        driven, bare = rates["driven"][1:], rates["bare"][1:]
        ratios = [own / other for own, other in zip(driven, bare, strict=True)]
        fields = {"requests": size.driver_requests, "new_tokens": size.driver_new_tokens, "shape": size.run_shape}
        self._lines.write("driver", ratios, "of vllm.LLM", against="tokens/s, the same requests in turns", **fields)
        self._lines.write("driver_tokens_per_second", driven, "tokens/s", **fields)
        self._lines.write("vllm_tokens_per_second", bare, "tokens/s", **fields)


def round_line(round_of: Mapping[str, tuple[float, Sequence[int]]]) -> dict[str, Any]:
    """Return the fields of a round: seconds, tokens, and the longest completion, of both."""
    return {
        kind: {"seconds": round(seconds, 4), "tokens": sum(tokens), "longest": max(tokens)}
        for kind, (seconds, tokens) in round_of.items()
    }


def decode_bytes(shape: str, num_requests: int, new_tokens: int) -> float:
    """Return the bytes that a decode step reads: bfloat16 weights once, and the cache of all requests at mid-way."""
    config = config_of(shape)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width, head = config["hidden_size"], config["head_dim"]
    layer = width * head * (2 * heads + 2 * groups) + 3 * width * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * width
    cache = config["num_hidden_layers"] * 2 * groups * head * (PROMPT_TOKENS / 8 + new_tokens / 2)
    return 2.0 * (weights + num_requests * cache)


def run_options(size: Size, device: str) -> argparse.Namespace:
    """Return the options of `grpo_gpu.py` for this size."""
    return argparse.Namespace(
        device=device, shape=size.run_shape, prompts=size.prompts, samples=size.samples, new_tokens=size.new_tokens,
        mean_tokens=size.mean_tokens, row=size.run_row, slots=size.slots,
    )  # fmt: skip


def main() -> int:
    options = options_of(__doc__)
    items = RunItems(options, ItemLines(options.items, Budget(options.budget_seconds)))
    folder = options.work / "run"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_inputs(run_options(options.size, options.device), folder)
    first = PLAN[0]
    overrides = [
        f"rollout.kv_cache_gib={options.size.kv_cache_gib:g}", "weights.bucket_mib=64",
        f"trainer.offload=[{','.join(first.offload)}]", f"trainer.recompute={first.recompute}",
        f"cluster.start_timeout_seconds={START_TIMEOUT_SECONDS:g}",
    ]  # fmt: skip
    overrides += [f"rollout.vllm.{name}={str(value).lower()}" for name, value in engine_settings().items()]
    code = run_measured(["train", str(recipe), "--restart", *overrides], items.loop)
    # A run that was measured to its end is stopped, which is an error of megarl's command line.
    return 0 if items.is_complete else code or 1


if __name__ == "__main__":
    sys.exit(main())
