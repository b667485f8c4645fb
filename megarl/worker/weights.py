"""A rank's end of the reshard: the trainer's weights, the engine's, or both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.families.shape import read_model_shape
from megarl.platform.left_collective import OwnWorldError, in_own_world
from megarl.platform.spans import span
from megarl.reshard.layouts.placed import reshard_ends
from megarl.reshard.live import GatheredReshard, Reshard, record
from megarl.reshard.plan import RankTopology
from megarl.reshard.probe import TOLERANCES, check_logprobs, probe_prompt
from megarl.reshard.staging import gathered
from megarl.types import ConfigError, TrainingSequence

if TYPE_CHECKING:
    from megarl.engine.engine import RolloutEngine
    from megarl.training.engine import TrainingEngine
    from megarl.training.snapshot import Snapshot


class WeightsEnd:
    """The reshard from the trainers' weights into the engines', as one rank carries it out.

    The rank has a `policy`, or a `snapshot` of it, an `engine`, or both. `topology` is that of all ranks of the
    reshard, which are the world's or those of `group`, trainers first. `version` is that of the weights that are there,
    the engine's next one unless given. Making one is a collective of all ranks, which plans, moves all weights once and
    verifies them; raises MegarlError with the first parameter that is not as it should be.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: ParallelConfig,
        topology: RankTopology,
        *,
        policy: TrainingEngine | None = None,
        snapshot: Snapshot | None = None,
        engine: RolloutEngine | None = None,
        transformer_engine: bool | None = None,
        replica: int = 0,
        group: dist.ProcessGroup | None = None,
        version: int | None = None,
    ) -> None:
        """`transformer_engine`: whether the trainer has its layers; None on a rank that does not know.

        `replica` is the number of this rank's engine, for messages.
        """
        self._recipe, self._layout, self._topology = recipe, layout, topology
        self._policy, self._engine, self._replica, self._group = policy, engine, replica, group
        self._snapshot = snapshot
        self._shape = read_model_shape(recipe.model.folder, recipe.override_of(recipe.model.folder))
        self._transformer_engine = bool(
            next(known for known in gathered(transformer_engine, group) if known is not None)
        )
        self.notices: list[str] = []
        """Notices for the user about how the weights are moved."""
        with self._in_memory(version):
            self.resharding = self._planned()
            self.first_report = self.resharding.self_test()
            """Seconds and bytes of the reshard at the start, as `reshard` returns them of one that is verified."""
            trainer_logprobs = self._probe_trainer() if self._is_probed else None
        if self._is_probed:
            started = time.perf_counter()
            self.first_report["probe_gap"] = self._check_probe(trainer_logprobs)
            self.first_report["verify_seconds"] = time.perf_counter() - started

    def reshard(self, *, verify: bool = False, version: int | None = None) -> dict[str, float]:
        """Move the trainer's weights into the engines; with `verify`, compare. Returns seconds and bytes by stage.

        Compared are checksums, or where an engine converts its weights log-probs: then `probe_gap` is the mean
        distance in nats. Raises MegarlError with the first parameter that differs, or the rank whose log-probs do.
        """
        trainer_logprobs = None
        meet_seconds = self._meet()
        with self._in_memory(version):
            with span("move weights"):
                report = self.resharding.run() | meet_seconds
            started = time.perf_counter()
            if verify and isinstance(self.resharding, Reshard):
                self.resharding.verify()
            elif verify:
                trainer_logprobs = self._probe_trainer()
            seconds = time.perf_counter() - started
        if not verify:
            return report
        if self._is_probed:
            started = time.perf_counter()
            report["probe_gap"] = self._check_probe(trainer_logprobs)
            seconds += time.perf_counter() - started
        report["verify_seconds"] = seconds
        return report

    def _meet(self) -> dict[str, float]:
        """Wait on the host until all ranks of the bridge are here. Returns `meet_seconds`; nothing without a bridge.

        A trainer that sends in the background comes before the engines have paused. If it began to send, kernels of
        NCCL would wait on its GPU, on 16 to 32 multiprocessors, while it trains.
        """
        if self._group is None:
            return {}
        started = time.perf_counter()
        with span("meet engines"):
            gathered(None, self._group)
        return {"meet_seconds": time.perf_counter() - started}

    def _planned(self) -> Reshard | GatheredReshard:
        policy, engine = self._policy, self._engine
        dtype = getattr(torch, self._recipe.model.dtype)
        ends = reshard_ends(self._shape, self._layout, len(self._topology), transformer_engine=self._transformer_engine)
        source = policy or self._snapshot
        parameters = source.weights if source is not None else {}
        recorded, refusal = record(engine.model if engine is not None else None, self._shape, dtype, self._group)
        if recorded is None and self._recipe.rollout.quantization != "none":
            raise ConfigError(
                f"rollout.quantization = {self._recipe.rollout.quantization}: the engine's weights cannot be written "
                f"in place, because of {refusal}; or set rollout.quantization=none"
            )
        if recorded is None and not self._recipe.rollout.recompute_kv:
            raise ConfigError(
                f"rollout.recompute_kv = false: the engine takes its weights as full tensors, because of {refusal}, "
                "and these are verified by a prompt that it is given alone; set it to true"
            )
        if recorded is None and self._group is not None and self._recipe.weights.overlap:
            raise ConfigError(
                f"weights.overlap = true: the engine takes its weights as full tensors, because of {refusal}, and they "
                "are verified by a forward pass of the trainer, which trains meanwhile; set it to false"
            )
        if recorded is None:
            self.notices.append(f"weights go to the engine as full tensors, which is slow, because of {refusal}")
            return GatheredReshard(
                ends.sources,
                self._shape,
                parameters,
                self._load if engine is not None else None,
                dtype=dtype,
                bucket_bytes=self._recipe.weights.bucket_mib << 20,
                topology=self._topology,
                first_engine=ends.first_engine,
                group=self._group,
            )
        return Reshard(
            ends.sources,
            ends.destinations,
            recorded,
            parameters,
            engine.model if engine is not None else None,
            dtype=dtype,
            bucket_bytes=self._recipe.weights.bucket_mib << 20,
            topology=self._topology,
            group=self._group,
        )

    @contextmanager
    def _in_memory(self, version: int | None) -> Iterator[None]:
        """Within it only the weights of trainer and engine are on the device; afterwards the engine can sample.

        A trainer with a device of its own keeps what it has there.
        """
        policy, engine = self._policy, self._engine
        with ExitStack() as stack:
            if policy is not None:
                if engine is not None:
                    policy.offload(but=("parameters",))
                policy.onload(("parameters",))
            if engine is not None:
                with self._of_engine():
                    engine.wake(["weights"])
            if policy is not None:
                stack.enter_context(policy.merged())
            yield
        if engine is not None:
            if policy is not None:
                policy.offload()
            with self._of_engine():
                engine.wake(["kv_cache"])
                engine.weights_updated(version)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have the engine load tensors as they come from the reshard, whose errors are not its own world's."""
        failed: list[Exception] = []

        def coming() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from tensors
            except Exception as error:
                failed.append(error)
                raise

        assert self._engine is not None
        try:
            with self._of_engine():
                self._engine.load_tensors(coming())
        except OwnWorldError:
            if failed:
                raise failed[0] from None
            raise

    def _of_engine(self) -> AbstractContextManager[None]:
        """Where the engine has a world of its own, errors of that within are told from those of the bridge."""
        return nullcontext() if self._group is None else in_own_world()

    @property
    def _is_probed(self) -> bool:
        """Whether a reshard is verified by log-probs: the engines hold the weights in another form."""
        return isinstance(self.resharding, GatheredReshard)

    def _probe_trainer(self) -> NDArray[np.float32] | None:
        """The probe prompt's log-probs by the trainer, on ranks that report. A collective of all ranks."""
        # Where some trainers had an engine leave, the others do not begin to wait for them.
        gathered(None, self._group)
        if self._policy is None:
            return None
        prompt = self._probe_prompt()
        row = TokenBatch.from_sequences([TrainingSequence(prompt, np.arange(len(prompt)) > 0)])
        found = self._policy.forward([row] * self._layout.rows_multiple)
        return found[0] if found else None

    def _check_probe(self, trainer_logprobs: NDArray[np.float32] | None) -> float:
        """Mean distance, in nats, of the engines' log-probs of the probe prompt from the trainer's; see `probe`."""
        tolerance = self._recipe.weights.probe_tolerance or TOLERANCES[self._recipe.model.dtype]
        with self._of_engine():
            logprobs = None if self._engine is None else self._engine.prompt_logprobs(self._probe_prompt())
        return check_logprobs(
            trainer_logprobs,
            logprobs,
            replica=self._replica,
            tolerance=tolerance,
            group=self._group,
        )

    def _probe_prompt(self) -> NDArray[np.int64]:
        # One less: the engine samples a token behind a prompt that it scores.
        return probe_prompt(self._shape.vocab_size, self._recipe.trained_tokens - 1)
