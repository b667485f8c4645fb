"""The engine with FP8 weights and an FP8 cache: sampled tokens a second. An item of `gpu_quarter.py`.

Requests, shape and driver are those of the bfloat16 engine in `run_items.py`, whose tokens a second it compares with.
"""

from __future__ import annotations

import asyncio
import time

from megarl.data.chat import load_tokenizer
from megarl.platform import device
from megarl.types import SamplingSettings
from tools.bench.parts.budget import Budget
from tools.bench.parts.driven_engine import Bench, EngineSettings
from tools.bench.parts.shapes import config_of, stop_tokens, write_model
from tools.bench.quarter.item_lines import START_TIMEOUT_SECONDS, ItemLines, Options, engine_settings, options_of
from tools.bench.quarter.run_items import PROMPT_TOKENS
from tools.local_group import LocalGroup

FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
FP8_WEIGHTS = {"quantization": "fp8"}
"""For CPUs, most of which have no FP8 cache in vLLM, and for an imitated GPU."""


async def measure(options: Options, lines: ItemLines) -> None:
    """Start an engine in FP8 on a rank, and write its tokens a second."""
    size, is_gpu = options.size, options.device == "cuda"
    vllm = engine_settings()
    fp8 = FP8 if is_gpu and not vllm else FP8_WEIGHTS
    if is_gpu and vllm:
        # An imitated GPU runs Triton's kernels alone.
        vllm = {**vllm, "linear_backend": "triton"}
    model = options.work / f"dummy-{size.run_shape}"
    write_model(model, size.run_shape, dtype=None)
    settings = EngineSettings(
        str(model),
        size.slots,
        PROMPT_TOKENS + size.new_tokens,
        size.kv_cache_gib,
        "bfloat16",
        vllm=vllm,
        rollout=fp8,
    )
    environment = device.rank_environment(1) | ({} if is_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    started = time.monotonic()
    group = await LocalGroup(1).start(
        "tools.bench.parts.driven_engine:MeasuredEngine",
        {"settings": settings},
        log_folder=options.work / "logs",
        start_timeout_seconds=START_TIMEOUT_SECONDS,
        environment=environment,
    )
    try:
        lines.begin("fp8_engine")
        lines.write("start_seconds", [time.monotonic() - started], "s", against="a rank with an engine alone")
        stops = tuple(stop_tokens(config_of(size.run_shape)["vocab_size"], size.mean_tokens))
        sampling = SamplingSettings(size.driver_new_tokens, stop_token_ids=stops)
        tokenizer = load_tokenizer(model)
        bench = Bench(group, tokenizer, settings, num_attempts=size.driver_requests, sampling=sampling)
        rates = []
        for _ in range(size.rounds + 1):
            used, trajectories = await bench.sample_driven(1)
            tokens = sum(int(segment.loss_mask.sum()) for trajectory in trajectories for segment in trajectory.segments)
            rates.append(tokens / used.seconds)
        lines.write(
            "fp8_tokens_per_second", rates[1:], "tokens/s", against="driver_tokens_per_second, in bfloat16",
            requests=size.driver_requests, new_tokens=size.driver_new_tokens, shape=size.run_shape, **fp8,
        )  # fmt: skip
    finally:
        await group.close()


def main() -> None:
    options = options_of(__doc__)
    lines = ItemLines(options.items, Budget(options.budget_seconds))
    if lines.wants("fp8_engine"):
        with lines.measuring("fp8_engine", begins=False):
            asyncio.run(measure(options, lines))


if __name__ == "__main__":
    main()
