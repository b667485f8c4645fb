"""The adapters of many models on a training rank.

One model is live: the policy has its weights. The others are copies in host memory, and on disk after a while without
calls.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.models.lora import adapters_of
from megarl.models.policy import PolicyModel
from megarl.platform.memory.host_memory import available_bytes
from megarl.service.ranks.memory_limits import RankMemory
from megarl.service.ranks.objectives import make_objective, measure_losses
from megarl.service.ranks.rank_saves import SaveOutcome, save_model
from megarl.service.ranks.rank_top_tokens import TopTokensHead, select_scores
from megarl.service.storage.deletion import delete_file
from megarl.training.optimizer import step_if_finite
from megarl.training.state import checkpoint
from megarl.training.state.exchange import (
    TrainedState,
    copy_state,
    drop_moments,
    read_state,
    restore_state,
    state_bytes,
    trained_parameters,
    write_state,
)
from megarl.training.training_engine import TrainingEngine

_LOG = logging.getLogger(__name__)

Rows = Sequence[TokenBatch] | None
"""The rows of a replica, on its first rank; None on other ranks."""


class Adapters:
    """This rank's part of a service's models and published versions. Except `read_back`, all methods are
    collectives of the trainer.

    The policy must be on its device, and engines on the same device asleep.
    """

    def __init__(self, policy: TrainingEngine, parallel: ParallelConfig) -> None:
        self._policy, self._parallel = policy, parallel
        self._live_model: str | None = None
        """The model in the policy; None: the policy may be overwritten."""
        self._states_in_memory: dict[str, TrainedState] = {}
        self._files_on_disk: dict[str, Path] = {}
        self._weights_by_version: dict[str, list[Tensor]] = {}
        # Only the last stage computes log-probs.
        last_stages = [chunk for chunk in policy.chunks if isinstance(chunk, PolicyModel) and chunk.post_process]
        self._top_tokens_heads = [TopTokensHead(model) for model in last_stages]
        for model, head in zip(last_stages, self._top_tokens_heads, strict=True):
            model.extra_heads.append(head)

    def measure_memory(self) -> RankMemory:
        copy_bytes = sum(parameter.nbytes for parameter in trained_parameters(self._policy))
        return RankMemory(socket.gethostname(), state_bytes(self._policy), copy_bytes, available_bytes())

    def create(self, name: str, seed: int) -> None:
        """Create a model with new adapters and a new optimizer."""
        self.copy_live_to_host()
        for _, _, adapter in adapters_of(self._policy.chunks):
            adapter.reset(seed)
        self._policy.clear_gradients()
        drop_moments(self._policy)
        # The main weights are still copies of the weights that the optimizer was built with.
        self._policy.optimizer.reload_model_params()
        self._live_model = name

    def accumulate(
        self, rows: Rows, name: str, loss: str, settings: Mapping[str, float]
    ) -> list[NDArray[np.float32]] | None:
        """Add a call's gradients. Returns log-probs and losses, [2, tokens] per row; None on other ranks."""
        self._bring_into_policy(name)
        results = self._policy.accumulate(self._policy.share_rows(rows), make_objective(loss, settings))
        return self._policy.unpack_outputs(results)

    def measure(
        self, rows: Rows, name: str, loss: str, settings: Mapping[str, float]
    ) -> list[NDArray[np.float32]] | None:
        """Return the results of `accumulate`, from a pass without gradients."""
        self._bring_into_policy(name)
        measure_row = partial(measure_losses, name=loss, settings=settings)
        return self._policy.unpack_outputs(self._policy.run_forward(self._policy.share_rows(rows), measure_row))

    def clear(self, name: str) -> None:
        self._bring_into_policy(name)
        self._policy.clear_gradients()

    def step(self, name: str, adam: Mapping[str, float]) -> tuple[float, bool]:
        """Run a step of AdamW. Returns the gradients' norm, and whether weights changed.

        Without a call of `accumulate` since the last step nothing changes, and the norm is 0.
        """
        self._bring_into_policy(name)
        policy = self._policy
        # Momentum and weight decay alone would still move the weights.
        if policy.gradient_reduction.pending is None:
            return 0.0, False
        # Reduce here, not in each pass: a reduction would sum earlier gradients over the ranks again.
        policy.reduce_gradients()
        # `step_if_finite` and the inner Adam read these values at every step, so each call can set others.
        inner_optimizers: list[Any] = policy.optimizer.chained_optimizers
        for inner_optimizer in inner_optimizers:
            inner_optimizer.config.clip_grad = adam["grad_clip_norm"]
            for group in inner_optimizer.optimizer.param_groups:
                group["lr"], group["weight_decay"] = adam["learning_rate"], adam["weight_decay"]
                group["betas"], group["eps"] = (adam["beta1"], adam["beta2"]), adam["eps"]
        # Clear gradients also after a refused step, as the client's error text says.
        norm, is_applied = step_if_finite(policy.optimizer, is_allowed=True)
        policy.clear_gradients()
        return norm, is_applied

    def save(self, name: str, folder: Path) -> SaveOutcome:
        """Write a model's state, without gradients, to an empty folder, readable with any parallel sizes."""
        self._bring_into_policy(name)
        return save_model(self._policy, self._parallel, folder)

    def load(self, name: str, folder: Path, with_optimizer: bool) -> str | None:
        """Create a model from a saved state, after `checkpoint.torch_dist_reader.check_intact`.

        Returns the fault if a rank cannot read its part. Then no rank has a model of this name.
        """
        self.copy_live_to_host()
        # The loaded state replaces a model of this name: remove its older copy.
        self._discard(name)
        self._policy.clear_gradients()
        # Do not mix moments and step counts of the previous model with the loaded ones.
        drop_moments(self._policy)
        try:
            checkpoint.restore_models(folder, {"": self._policy}, str(self._parallel))
        # torch raises it on all ranks alike, so none waits for another. `_bring_into_policy` will overwrite the partly
        # restored state.
        except CheckpointException as error:
            return f"{folder}: {error!s:.1000}"
        # A restore always reads the moments. They can only be dropped afterwards.
        if not with_optimizer:
            drop_moments(self._policy)
        self._live_model = name
        return None

    def publish(self, name: str, version: str) -> None:
        self._bring_into_policy(name)
        self._weights_by_version[version] = self._copy_weights()

    def publish_folder(self, folder: Path, version: str) -> str | None:
        """Copy a saved state's adapters under the name of a version. Returns a fault like `load`."""
        if (fault := self.load(version, folder, False)) is None:
            self._weights_by_version[version] = self._copy_weights()
            # Do not keep the loaded state as a model: nobody trains it.
            self._live_model = None
        return fault

    def show(self, version: str | None) -> None:
        """Write a version's adapters into the policy, for the next reshard. None: the base model."""
        self.copy_live_to_host()
        with torch.no_grad():
            if version is None:
                # An adapter adds a multiple of B A x. B = 0 gives the base model.
                for _, _, adapter in adapters_of(self._policy.chunks):
                    adapter.b.zero_()
                return
            # The main weights do not change. The next `_bring_into_policy` restores them together with the weights.
            for parameter, values in zip(
                trained_parameters(self._policy), self._weights_by_version[version], strict=True
            ):
                parameter.copy_(values)

    def score(self, rows: Rows, version: str | None, num_top_tokens: int) -> list[NDArray[np.float32]] | None:
        """Return scores of the rows' tokens under a version: float32 [1 + 2 * num_top_tokens, tokens] per row.

        The values of a token are its log-prob, then ids and log-probs of the most likely tokens at its position.
        """
        self.show(version)
        for head in self._top_tokens_heads:
            head.count = num_top_tokens
        try:
            results = self._policy.run_forward(
                self._policy.share_rows(rows), partial(select_scores, count=num_top_tokens)
            )
        finally:
            # Training passes do not need these rows, and would compute them.
            for head in self._top_tokens_heads:
                head.count = 0
        return self._policy.unpack_outputs(results)

    def move_to_disk(self, names: Sequence[str], folder: Path) -> tuple[list[str], str | None]:
        """Write idle models to a folder, and free their host memory until `read_back`.

        A model with gradients since its last step stays. Returns the models on disk, and the first disk error.
        """
        fault = self._write_idle(names, folder)
        return [name for name in names if name in self._files_on_disk], fault

    def _write_idle(self, names: Sequence[str], folder: Path) -> str | None:
        """Write the models' states to files until the first disk error, and return it."""
        if self._live_model in names:
            self.copy_live_to_host()
        for name in names:
            state = self._states_in_memory.get(name)
            # With a reduction pending, the model has gradients since its last step.
            if state is not None and state.reduction is None:
                file = folder / f"{name}_{dist.get_rank()}.pt"
                try:
                    write_state(state, file)
                # torch's writer raises RuntimeError for a full disk.
                except (OSError, RuntimeError) as error:
                    delete_file(file, _LOG.warning)
                    return f"{file}: {type(error).__name__}: {error!s:.300}"
                del self._states_in_memory[name]
                self._files_on_disk[name] = file
        return None

    def read_back(self, name: str) -> str | None:
        """Read a model's state from this rank's disk to host memory, if it is on disk. Returns the disk's fault.

        After a fault the file stays, and the call can be repeated. Not a collective.
        """
        file = self._files_on_disk.get(name)
        if file is None:
            return None
        try:
            self._states_in_memory[name] = read_state(file)
        # A damaged file raises errors of many types: of zip archives, of pickle, KeyError. A disk may fail for a while
        # only.
        except Exception as error:
            return f"{file}: {type(error).__name__}: {error!s:.300}"
        self._discard_file(name)
        return None

    def forget(self, models: Sequence[str], versions: Sequence[str]) -> None:
        for name in models:
            self._discard(name)
            self._live_model = None if self._live_model == name else self._live_model
        for name in versions:
            self._weights_by_version.pop(name, None)

    def _bring_into_policy(self, name: str) -> None:
        """Bring a model's state from host memory into the policy. The state must not be on disk (`read_back`)."""
        if self._live_model == name:
            return
        self.copy_live_to_host()
        restore_state(self._policy, self._states_in_memory.pop(name))
        self._live_model = name

    def _discard(self, name: str) -> None:
        self._states_in_memory.pop(name, None)
        self._discard_file(name)

    def _discard_file(self, name: str) -> None:
        if (file := self._files_on_disk.pop(name, None)) is not None:
            # A rank's error would end the service. A file that stays only takes room.
            delete_file(file, _LOG.warning)

    def copy_live_to_host(self) -> None:
        """Copy the live model's state to host memory. Then the policy may be overwritten."""
        if self._live_model is not None:
            self._states_in_memory[self._live_model] = copy_state(self._policy)
        self._live_model = None

    def _copy_weights(self) -> list[Tensor]:
        # Versions are kept in host memory: the device is needed for one model and the engines.
        return [parameter.detach().to("cpu", copy=True) for parameter in trained_parameters(self._policy)]
