"""A trained model behind the endpoint, on one engine of this machine."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.local import LocalGroup
from megarl.config import RolloutConfig
from megarl.config.parallel import ParallelConfig
from megarl.config.rollout import EndpointConfig
from megarl.data.chat import load_tokenizer
from megarl.files.model_folder import read_object, weight_files
from megarl.platform import device
from megarl.rollout.pool import EnginePool
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.sessions import Limits, Sessions
from megarl.tracking.earlier_run import newest_checkpoint
from megarl.types import DataError, Request, SamplingSettings

IDLE_SECONDS = 3600.0
_MAX_CALLS = 1 << 31


class EngineRank:
    """The worker of a rank that samples and trains nothing.

    Without a `dtype` the weights have the one that the model's folder names.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        folder: str,
        config: RolloutConfig,
        context_tokens: int,
        dtype: str | None = None,
        seed: int = 0,
        override: Mapping[str, Any] | None = None,
    ) -> None:
        """`override` as in `engine.RolloutEngine`."""
        from megarl.engine.engine import RolloutEngine

        device.init_world(600.0)
        dtype = dtype or str(read_object(Path(folder) / "config.json").get("dtype", "bfloat16"))
        self._engine = RolloutEngine(
            folder, config, max_model_len=context_tokens, dtype=dtype, seed=seed, override=override
        )
        self._engine.load_tensors(_tensors(Path(folder)))
        self._engine.weights_updated()

    def advance(
        self, work: tuple[tuple[Request, ...], tuple[str, ...]], budget_seconds: float, leave_after: int | None
    ) -> list[Any]:
        """As `engine.RolloutEngine.advance`; `work` is (requests, ids to abort)."""
        return self._engine.advance(*work, budget_seconds, leave_after=leave_after)


def model_folder(path: Path, *, is_best: bool = False) -> Path:
    """The model folder of a run, or the one that a path is. Raises DataError for any other, or one without weights.

    `is_best`: of a run that of its best evaluation.
    """
    is_run = (path / "config.yaml").is_file()
    folder = path / ("hf_best" if is_best else "hf") if is_run else path
    if is_best and not (is_run and (folder / "config.json").is_file()):
        raise DataError(f"{path}: is no run with a model of its best evaluation, hf_best (checkpoint.best)")
    if not (folder / "config.json").is_file():
        hint = "give one of them"
        if (path / "hf_best").is_dir():
            hint = "it has the model of its best evaluation, hf_best (megarl eval --best)"
        elif (checkpoint := newest_checkpoint(path)) is not None:
            made = checkpoint.parents[1] / f"hf_{checkpoint.name}"
            hint = f"make a model of the checkpoint: megarl convert to-hf --megatron {checkpoint} --out {made}"
        raise DataError(f"{path}: is neither a model folder nor a run that has exported its model; {hint}")
    weight_files(folder)
    return folder


async def serve(path: Path, endpoint: EndpointConfig, rollout: RolloutConfig, tell: Callable[[str], object]) -> None:
    """Serve a model until SIGINT or SIGTERM; `tell` hears where it is served."""
    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    context_tokens = int(read_object(folder / "config.json")["max_position_embeddings"])
    device.require("auto")
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_end.set)
    if device.current().type == "cuda" and (notice := device.toolkit_notice()) is not None:
        tell(notice)
    with tempfile.TemporaryDirectory() as logs:
        group = await LocalGroup(rollout.tp, imports=device.forkable_imports("megarl.engine.engine")).start(
            "megarl.serving.local_model:EngineRank",
            {"folder": str(folder), "config": rollout, "context_tokens": context_tokens},
            log_folder=Path(logs),
            environment=device.rank_environment(rollout.tp),
        )
        pool = EnginePool(
            group, ParallelConfig(rollout.tp, 1, 1, rollout.tp), max_running=2 * rollout.max_concurrent_requests
        )
        codec = Codec(tokenizer, context_tokens)
        limits = Limits(context_tokens, _MAX_CALLS, IDLE_SECONDS)
        server = Endpoint(
            Sessions(pool, codec),
            endpoint,
            model=folder.absolute().parent.name if folder.name == "hf" else folder.absolute().name,
            sampling=SamplingSettings(context_tokens),
            guests=limits,
            notice=tell,
        )
        try:
            await server.start()
            tell(f"serving {folder} at {server.base_url}/v1; Ctrl-C ends it")
            await asked_to_end.wait()
        finally:
            await server.close()
            codec.close()
            await pool.drained()
            await group.close()


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for name in weight_files(folder):
        with safe_open(folder / name, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118 (no mapping)
                yield tensor, file.get_tensor(tensor)
