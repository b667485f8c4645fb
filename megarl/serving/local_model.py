"""Serving of a trained model at the OpenAI-compatible endpoint, with one engine on this machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.local import LocalGroup
from megarl.config import RolloutConfig
from megarl.config.parallel import ParallelConfig
from megarl.config.rollout import EndpointConfig
from megarl.data.chat import load_tokenizer
from megarl.data.templates.turn_ends import added_turn_ends, turn_ends_notice
from megarl.families.model_tensors import list_copied_prefixes
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import read_object, weight_files
from megarl.files.private_folder import PrivateFolder
from megarl.groups import world
from megarl.platform import device
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.processes.listening import listen_fault, taken_text
from megarl.rollout.pool import EnginePool
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.served_adapters import served_adapter
from megarl.serving.sessions import Limits, Sessions
from megarl.tracking.earlier_run import checkpoint_step, newest_checkpoint
from megarl.types import ConfigError, DataError, Request, SamplingSettings, ServedAdapter

IDLE_SECONDS = 3600.0
"""Seconds without a call after which a client's session ends."""
_MAX_CALLS = 1 << 31
"""Maximum model calls of a client's session; practically no limit."""


class EngineRank:
    """Rank process that only samples: one vLLM engine, without a trainer.

    `dtype` None: the weights have the type named by the model folder.
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
        adapters: Mapping[str, ServedAdapter] | None = None,
    ) -> None:
        """Load the model folder's weights and LoRA adapters into an engine. `override` sets engine options of vLLM."""
        # Imported in the rank's process: the driver needs neither torch nor vLLM.
        from megarl.checkpoint.safetensors import check_folder
        from megarl.engine.engine import RolloutEngine
        from megarl.engine.engine_parts import EngineFeatures

        # The timeout in seconds of collectives between the engine's ranks.
        world.initialize(600.0)
        dtype = dtype or weights_dtype(Path(folder))
        self._engine = RolloutEngine(
            folder,
            config,
            max_model_len=context_tokens,
            dtype=dtype,
            seed=seed,
            override=override,
            features=EngineFeatures(served=adapters or {}),
        )
        check_folder(Path(folder), override)
        kept = list_copied_prefixes(read_model_shape(folder, override))
        self._engine.load_tensors(_tensors(Path(folder), kept))
        self._engine.load_files()
        self._engine.weights_updated()

    def advance(
        self, work: tuple[tuple[Request, ...], tuple[str, ...]], budget_seconds: float, leave_after: int | None
    ) -> list[Any]:
        """Let the engine sample for a while, and return the finished completions.

        `work` is (new requests, ids of requests to abort). The call returns after `budget_seconds`, or after
        `leave_after` completions.
        """
        return self._engine.advance(*work, budget_seconds, leave_after=leave_after)


def model_folder(path: Path, *, is_best: bool = False) -> Path:
    """Return the folder of a run's exported model, or `path` if it is a model folder itself.

    `is_best`: return the model of the run's best evaluation. Raises DataError if there is no model, or if it has no
    weights.
    """
    is_run = (path / "config.yaml").is_file()
    folder = path / ("hf_best" if is_best else "hf") if is_run else path
    if is_best and not (is_run and (folder / "config.json").is_file()):
        raise DataError(
            f"{path}: has no model of a best evaluation (folder hf_best); give a run that set checkpoint.best"
        )
    if not (folder / "config.json").is_file():
        hint = "give one of the two"
        if (path / "hf_best").is_dir():
            hint = "it has the model of its best evaluation, hf_best (megarl eval --best)"
        elif (checkpoint := newest_checkpoint(path)) is not None:
            run, step = checkpoint.parents[1], checkpoint_step(checkpoint)
            hint = f"make a model of the checkpoint: megarl export {run} --step {step}"
        raise DataError(f"{path}: is neither a model folder nor a run that has exported its model; {hint}")
    weight_files(folder)
    return folder


def weights_dtype(folder: Path) -> str:
    """Return the dtype named by a model folder's config.json; bfloat16 without one."""
    return str(read_object(folder / "config.json").get("dtype", "bfloat16"))


async def serve(
    path: Path,
    endpoint: EndpointConfig,
    rollout: RolloutConfig,
    notify: Callable[[str], object],
    adapters: Sequence[str] = (),
) -> None:
    """Serve a model until the process receives SIGINT or SIGTERM. The address is passed to `notify`.

    `adapters` are LoRA adapters as NAME=FOLDER. A request uses one by its field `model`.
    """
    folder = model_folder(path)
    # Before the engine starts, which takes minutes for a large model.
    if endpoint.port and (fault := listen_fault(endpoint.host, endpoint.port)) is not None:
        raise ConfigError(f"--port {endpoint.port}: {taken_text(endpoint.host, endpoint.port, fault)}")
    tokenizer = load_tokenizer(folder)
    if ends := added_turn_ends(folder, tokenizer):
        notify(turn_ends_notice(ends, folder, tokenizer))
    shape = read_model_shape(folder)
    context_tokens = shape.max_position_embeddings
    # A run's export is named hf, so the run's name says more.
    model = folder.absolute().parent.name if folder.name == "hf" else folder.absolute().name
    served: dict[str, ServedAdapter] = {}
    for text in adapters:
        name, adapter = served_adapter(text, shape)
        if name in served or name == model:
            raise ConfigError(f"--adapter {text}: the name {name} is taken; give another")
        served[name] = adapter
    if served and weights_dtype(folder) == "float32" and not runs_on_cpu():
        raise ConfigError(
            f"--adapter {adapters[0]}: vLLM's kernels for adapters on GPUs need 16-bit weights, but {folder} has dtype "
            "float32; convert the model to bfloat16"
        )
    device.require("auto")
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Installed before the engine starts, so that Ctrl-C during the start ends the processes in order.
        loop.add_signal_handler(number, asked_to_end.set)
    if device.current().type == "cuda" and (notice := device.toolkit_notice()) is not None:
        notify(notice)
    with PrivateFolder() as logs:
        group = await LocalGroup(rollout.tp, imports=device.forkable_imports("megarl.engine.engine")).start(
            "megarl.serving.local_model:EngineRank",
            {"folder": str(folder), "config": rollout, "context_tokens": context_tokens, "adapters": served},
            log_folder=logs,
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
            model=model,
            adapters=tuple(served),
            sampling=SamplingSettings(context_tokens, stop_token_ids=ends),
            guests=limits,
            notice=notify,
            load=pool.load,
        )
        try:
            await server.start()
            notify(f"serving {folder} at {server.base_url}/v1; Ctrl-C ends it")
            if endpoint.metrics:
                notify(f"metrics at {server.base_url}/metrics, health at {server.base_url}/health")
            await asked_to_end.wait()
        finally:
            await server.close()
            codec.close()
            # Aborted requests must leave the engine before its process ends.
            await pool.wait_until_drained()
            await group.close()


def _tensors(folder: Path, kept: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model folder by name, each read from disk only when it is yielded.

    Tensors with a prefix in `kept`, such as those of a vision tower, are left out: the engine has no place for them.
    """
    from safetensors import safe_open

    for name in weight_files(folder):
        with safe_open(folder / name, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118 (no mapping)
                if not tensor.startswith(kept):
                    yield tensor, file.get_tensor(tensor)
