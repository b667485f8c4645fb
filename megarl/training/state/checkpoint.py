"""Checkpoints of the trainer's state in Megatron's `torch_dist` format, written in the background and read with any
parallel sizes.

Planning and finishing a save are collectives. In between, a thread of each rank writes its own file. Megatron would
fork: a fork copies sockets, locks and the CUDA context. It may outlive a killed rank, and write into the folder of the
rank's successor.
"""

from __future__ import annotations

import inspect
import io
import queue
import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item

from megarl import faults
from megarl.checkpoint.manifest import ManifestWriter
from megarl.files.atomic import check_space, raise_disk_full_errors
from megarl.models.lora import shard_adapters
from megarl.platform import device
from megarl.training.host.host_optimizer import allocate_moments, is_hybrid, set_step
from megarl.training.host.offload import copy_to_pinned_blocks
from megarl.training.model import FrozenModel
from megarl.training.muon.optimizer import MuonWithAdam
from megarl.training.parts.lora import LoraPart
from megarl.training.state.optimizer_state import copy_to_optimizer, sharded_optimizer_state
from megarl.training.training_engine import TrainingEngine

Model = TrainingEngine | FrozenModel

_FORMAT = {
    # For this format, Megatron would gather the state on all ranks; `optimizer_state` writes it without gathering.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_OVERHEAD_BYTES = 4096
"""Maximum bytes of a tensor in a checkpoint beyond its elements: torch's headers, and the manifest's entry."""


class Save:
    """One save of a checkpoint, from this rank's memory to a folder. `num_bytes`: size of all ranks' files."""

    def __init__(self, folder: Path, request: AsyncRequest) -> None:
        """Take the rank's data from Megatron's request, and sum the bytes of all ranks. A collective."""
        self._folder, self._request = folder, request
        self._manifest = ManifestWriter(folder)
        # Megatron-Core 0.16.1 makes one bucket per file: its name, byte objects and tensors. A rank without data has
        # no arguments.
        _, buckets, self._results = request.async_fn_args or (None, [], None)
        self._buckets: list[Any] = [(name, *contents) for _, name, contents in buckets]
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write_files, name="checkpoint", daemon=True)
        rank_contents = [data for _, objects, tensors in self._buckets for _, data in (*objects, *tensors)]
        num_rank_bytes = sum(map(_num_bytes, rank_contents))
        total_bytes = torch.tensor(num_rank_bytes + _OVERHEAD_BYTES * (len(rank_contents) + 1), device=device.current())
        dist.all_reduce(total_bytes)
        self.num_bytes = int(total_bytes)

    def write(self, *, asynchronous: bool) -> None:
        """Write this rank's share; with `asynchronous` in the background, from copies. Raises DiskFullError."""
        # Check the space first, because a partial checkpoint is useless.
        check_space(self._folder, self.num_bytes)
        self._buckets = [
            (
                name,
                [*objects, *zip((item for item, _ in tensors), self._copy_to_host(tensors, asynchronous), strict=True)],
            )
            for name, objects, tensors in self._buckets
        ]
        self._thread.start()
        if not asynchronous:
            self._thread.join()

    @property
    def error(self) -> Exception | None:
        """The error that ended this rank's writing; None: it goes on, or is complete."""
        return self._error

    def _copy_to_host(self, tensors: Sequence[tuple[Any, torch.Tensor]], is_copied: bool) -> list[torch.Tensor]:
        """Return the tensors in host memory; with `is_copied`, later changes do not affect them."""
        values = [tensor for _, tensor in tensors]
        if device.current().type == "cuda":
            return copy_to_pinned_blocks(values, pin=True)
        return [tensor.to("cpu", copy=is_copied) for tensor in values]

    def finish(self, *, wait: bool = True) -> dict[str, dict[str, Any]] | None:
        """Add Megatron's records after all ranks have written. A collective.

        Returns size and sha256 of this rank's files, or None if a rank is still writing and `wait` is false. Raises
        DiskFullError, or the error that ended the writing.
        """
        # All ranks must decide alike, because finishing is a collective.
        num_writing = torch.tensor(int(self._thread.is_alive()), device=device.current())
        dist.all_reduce(num_writing)
        if num_writing and not wait:
            return None
        self._thread.join()
        faults.reach("save_finish")
        with raise_disk_full_errors(self._folder, self.num_bytes):
            if self._error:
                raise self._error
            for finalize in self._request.finalize_fns:
                finalize()
        return self._manifest.files

    def _write_files(self) -> None:
        """Write this rank's files in a background thread, then put their storage information into Megatron's queue."""
        results_by_bucket = {}
        try:
            for index, (name, contents) in enumerate(self._buckets):
                stream: Any = self._manifest.stream(name)
                faults.reach("save_write")
                results_by_bucket[index] = [
                    _write_item(
                        _StorageWriterTransforms(),
                        stream,
                        _without_shared_memory(data),
                        item,
                        name,
                        SerializationFormat.TORCH_SAVE,
                    )
                    for item, data in contents
                ]
            self._manifest.release(durable=True)
        except Exception as error:
            self._error = error
        # Release the copies, which are as large as the state itself.
        self._buckets = []
        if self._results is not None:
            self._results.put(results_by_bucket)


def _num_bytes(value: torch.Tensor | io.BytesIO) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else value.getbuffer().nbytes


def _without_shared_memory(data: Any) -> Any:
    """Return a tensor with memory for its elements only: torch would save the whole memory behind a view."""
    if not isinstance(data, torch.Tensor) or data.untyped_storage().nbytes() == data.nbytes:
        return data
    return data.clone()


@contextmanager
def load_changed_models(models: Mapping[str, Model]) -> Iterator[None]:
    """Context for a save: frozen models with changed weights (an updated reference) are on the device."""
    with ExitStack() as stack:
        for name in changed_models(models):
            stack.enter_context(models[name].on_device())
        yield


def plan_save(folder: Path, models: Mapping[str, Model], layout: str, **driver: Any) -> Save:
    """Plan a save of the models' states, this rank's random numbers and `driver`'s values. A collective.

    Tensor names begin with the name in `models`; an empty name keeps Megatron's names. Frozen models are saved only if
    their weights changed, within `load_changed_models`. `layout` says in words how ranks divide the state. Raises
    DiskFullError.
    """
    faults.reach("save_plan")
    changed_names = changed_models(models)
    state = sharded_states(models_to_save(models, changed_names), is_loading=False)
    state |= {"random": _random_states(), "layout": layout, "driver": driver, "moved": changed_names}
    # Megatron-Core 0.16.1 uses the queue of a `multiprocessing.Manager`, a process of its own. A thread needs only a
    # simple queue.
    filesystem_async._results_queue = queue.SimpleQueue()
    replica_group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # Each rank writes one file with its share of the weights that its replicas also have.
    rank_strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    strategy = FullyParallelSaveStrategyWrapper(rank_strategy, replica_group)
    # Megatron-Core 0.19 needs the package nvidia-resiliency-ext unless its own writer is chosen. 0.16.1 has no other.
    has_choice = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    writer_setting: dict[str, Any] = {"async_strategy": "mcore"} if has_choice else {}
    try:
        with raise_disk_full_errors(folder, _OVERHEAD_BYTES):  # Rank 0 already writes the state common to all ranks.
            request = dist_checkpointing.save(
                state, str(folder), strategy, async_sharded_save=True, content_metadata=dict(_FORMAT), **writer_setting
            )
    finally:
        filesystem_async._results_queue = None
    assert request is not None
    return Save(folder, request)


def restore_models(folder: Path, models: Mapping[str, Model], layout: str) -> dict[str, Any]:
    """Load a checkpoint's states into the models, whatever its parallel sizes. A collective.

    Returns the driver's values. A frozen model with unchanged weights stays as it is. Random numbers are restored only
    if `layout` is the saved one. Megatron's loader unpickles: the folder must have passed
    `checkpoint.torch_dist_reader.check_harmless`.
    """
    faults.reach("load")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    # `moved` names the frozen models whose weights have changed. Checkpoints of earlier versions lack it: no frozen
    # model could change then.
    saved_models = models_to_save(models, common.get("moved", ()))
    with ExitStack() as stack:
        for model in saved_models.values():
            if isinstance(model, FrozenModel):
                stack.enter_context(model.on_device(is_changed=True))
        request = sharded_states(saved_models, is_loading=True)
        if common["layout"] == layout:
            request["random"] = _random_states()
        state = dist_checkpointing.load(request, str(folder))
        assert isinstance(state, dict)
        for name, model in saved_models.items():
            _restore_model(model, state[name] if name else state)
    if "random" in state:
        _set_random_states(state["random"])
    return state["driver"]


def common_state(models: Mapping[str, Model], layout: str) -> dict[str, Any]:
    """Return all values of a checkpoint except tensors: step counts, and this rank's random numbers.

    `layout` says in words how ranks divide the state.
    """
    changed_names = changed_models(models)
    trained = {name: model for name, model in models.items() if isinstance(model, TrainingEngine)}
    return {
        "layout": layout,
        "moved": changed_names,
        "random": _random_states().data,
        "steps": {
            name: max(
                (
                    step
                    for optimizer_part in model.optimizer.chained_optimizers
                    if (step := optimizer_step(optimizer_part))
                ),
                default=None,
            )
            for name, model in trained.items()
        },
        "schedules": {name: model.schedule.num_steps for name, model in trained.items()},
    }


@contextmanager
def restore_common_state(
    models: Mapping[str, Model], states: Mapping[int, Any], layout: str
) -> Iterator[dict[str, Model]]:
    """Yield the models whose tensors the caller restores; then restore the other values.

    `states` has the result of `common_state` of each rank that had the state. Random numbers are restored only if
    `layout` is the same.
    """
    common = states[min(states)]
    saved_models = models_to_save(models, common["moved"])
    with ExitStack() as stack:
        for model in saved_models.values():
            if isinstance(model, FrozenModel):
                stack.enter_context(model.on_device(is_changed=True))
                model.has_moved = True
        yield saved_models
    for name, model in saved_models.items():
        if isinstance(model, TrainingEngine):
            # All parts of an optimizer step together, so take the maximum: a rank without parameters of a part has no
            # count.
            step = max((num_steps for state in states.values() if (num_steps := state["steps"][name])), default=None)
            for optimizer_part in model.optimizer.chained_optimizers:
                set_optimizer_step(optimizer_part, step)
            model.schedule.num_steps = 0
            model.schedule.step(increment=common["schedules"][name])
    if common["layout"] == layout:
        _set_random_states(states[dist.get_rank()]["random"])


def optimizer_step(optimizer: Any) -> int | None:
    """Return an optimizer's number of steps, as Adam's bias correction counts them; None for SGD."""
    if is_hybrid(optimizer):
        return int(optimizer.state_dict()["optimizer"]["param_groups"][0]["step"])
    inner_optimizer = optimizer.optimizer
    count_holders = list(inner_optimizer.state.values()) if _is_torch(optimizer) else inner_optimizer.param_groups
    # A rank may hold no parameter of this part. Then its state has no step to restore either.
    return next((int(count_holder["step"]) for count_holder in count_holders if "step" in count_holder), None)


def set_optimizer_step(optimizer: Any, step: int | None) -> None:
    """Set an optimizer's number of steps, wherever it stores it. None changes nothing."""
    if step is None:
        return
    if is_hybrid(optimizer):
        set_step(optimizer, step)
        return
    inner_optimizer = optimizer.optimizer
    for step_holder in inner_optimizer.state.values() if _is_torch(optimizer) else inner_optimizer.param_groups:
        step_holder["step"] = torch.tensor(float(step)) if _is_torch(optimizer) else step


def changed_models(models: Mapping[str, Model]) -> list[str]:
    """Return the names of frozen models whose weights changed (an updated reference)."""
    return [name for name, model in models.items() if isinstance(model, FrozenModel) and model.has_moved]


def models_to_save(models: Mapping[str, Model], moved: Collection[str]) -> dict[str, Model]:
    return {name: model for name, model in models.items() if isinstance(model, TrainingEngine) or name in moved}


def _restore_model(model: Model, state: dict[str, Any]) -> None:
    for name, chunk in _named_chunks(model).items():
        chunk.load_state_dict(without_pickles(state[name]), strict=not _has_adapters(model))
    if isinstance(model, TrainingEngine):
        _restore_training(model, state)
    else:
        # Only changed frozen models are saved, and later checkpoints must contain this one too.
        model.has_moved = True


def without_pickles(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state with empty extra states.

    Transformer Engine stores pickles there, and its layers load them unchecked. They hold FP8's delayed scaling, which
    is not supported (`trainer.megatron.fp8_recipe`).
    """
    empty = torch.empty(0, dtype=torch.uint8)
    return {
        name: empty if "_extra_state" in name and isinstance(value, torch.Tensor | io.BytesIO) else value
        for name, value in state.items()
    }


def _restore_training(engine: TrainingEngine, state: dict[str, Any]) -> None:
    """Restore moments, main weights and the step of the learning-rate schedule."""
    optimizer_parts = engine.optimizer.chained_optimizers
    saved_optimizers = (
        [state["optimizer"]]
        if len(optimizer_parts) == 1
        else [state["optimizer"][i] for i in range(len(optimizer_parts))]
    )
    chunks = _shard_chunks(engine)
    for optimizer, optimizer_state in zip(optimizer_parts, saved_optimizers, strict=True):
        restore_optimizer(optimizer, optimizer_state, chunks)
    engine.schedule.num_steps = 0
    engine.schedule.step(increment=state["schedule"]["num_steps"])


def _named_chunks(model: Model) -> dict[str, Any]:
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(model.chunks)}


def sharded_states(models: Mapping[str, Model], *, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded tensors of these models: each tensor's place in a checkpoint, and live values."""
    states: dict[str, Any] = {}
    for name, model in models.items():
        state = _shard_model(model, is_loading=is_loading)
        if name:
            add_prefix_for_sharding(state, f"{name}.")
        states |= {name: state} if name else state
    return states


def _metadata() -> dict[str, Any]:
    return _FORMAT | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _has_adapters(model: Model) -> bool:
    return isinstance(model, TrainingEngine) and model.find_part(LoraPart) is not None


def _shard_chunks(model: Model) -> dict[str, Any]:
    """Return each chunk's sharded tensors: only the adapters if the model has some, else all weights."""
    chunks = _named_chunks(model)
    if _has_adapters(model):
        # Nothing else is trained; the other weights are in the model's folder.
        return {name: shard_adapters(chunk) for name, chunk in chunks.items()}
    return {name: chunk.sharded_state_dict(metadata=_metadata()) for name, chunk in chunks.items()}


def _shard_model(model: Model, *, is_loading: bool) -> dict[str, Any]:
    """Return the sharded tensors of a model's chunks. A trained model's optimizer and schedule are included."""
    chunks = _shard_chunks(model)
    if not isinstance(model, TrainingEngine):
        return chunks
    for optimizer in model.optimizer.chained_optimizers:
        _allocate_moments(optimizer)
    optimizer_state = sharded_optimizer_state(model.optimizer, chunks, is_loading=is_loading, metadata=_metadata())
    return {**chunks, "optimizer": optimizer_state, "schedule": {"num_steps": model.schedule.num_steps}}


def _is_torch(optimizer: Any) -> bool:
    inner_optimizer = optimizer.optimizer
    return isinstance(
        inner_optimizer.adam if isinstance(inner_optimizer, MuonWithAdam) else inner_optimizer,
        torch.optim.Adam | torch.optim.AdamW,
    )


def _allocate_moments(optimizer: Any) -> None:
    """Allocate an optimizer's state before its first step. With torch's Adam, Megatron-Core 0.16.1 fails without it."""
    if is_hybrid(optimizer):
        allocate_moments(optimizer)
        return
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if _is_torch(optimizer):
        for state in optimizer.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


def restore_optimizer(optimizer: Any, saved: dict[str, Any], chunks: Mapping[str, Any]) -> None:
    """Restore moments, master weights and step count. Learning rates and weight decay stay the recipe's."""
    inner_optimizer = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        step = saved["optimizer"]["param_groups"][0]["step"]
        # Megatron-Core 0.16.1 looks up every entry of the state in the checkpoint, but the checkpoint has no `step`
        # (KeyError).
        for state in inner_optimizer.state.values():
            state.pop("step", None)
        copy_to_optimizer(optimizer, saved["param_state"], chunks)
        set_optimizer_step(optimizer, int(step))
        return
    # `load_state_dict` replaces the groups' settings by the saved ones. Put the recipe's settings back. Transformer
    # Engine's and apex's Adam count steps there too. A rollback must take the checkpoint's count.
    recipe_settings = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in inner_optimizer.param_groups
    ]
    if _is_torch(optimizer):
        inner_state = saved.get("optimizer", saved)["state"]
        # Megatron-Core 0.16.1 saves no step count of 0, but torch's Adam looks it up in each parameter's state.
        if "common_step" not in inner_state:
            for state in inner_state.values():
                state.setdefault("step", torch.zeros(()))
    optimizer.load_state_dict(saved)
    for group, settings in zip(inner_optimizer.param_groups, recipe_settings, strict=True):
        group.update(settings)


def _random_states() -> ShardedObject:
    """Return this rank's random states of all libraries, as one object of the checkpoint."""
    numpy_state: Any = np.random.get_state(legacy=True)
    generator_name, keys, *generator_state = numpy_state
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    states = {
        "python": random.getstate(),
        "numpy": (generator_name, keys.tolist(), *generator_state),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": tracker.get_states(),
    }
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    tracker.set_states(states["megatron"])
