"""One rank's share of copying weights from trainers to engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megarl import faults
from megarl.checkpoint.mapped import MappedFolder
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.engine.trained_adapter import TrainedAdapter
from megarl.families.lora_rules import adapter_shapes
from megarl.families.shape import read_model_shape
from megarl.groups.peer_errors import ReplicaCollectiveError, replica_collectives_marked
from megarl.platform.memory import peak_memory
from megarl.platform.spans import span
from megarl.reshard.adapters import AdapterReshard, record_slots
from megarl.reshard.boxes import Layout
from megarl.reshard.checks.file_rows import check_rows, sampled_names
from megarl.reshard.checks.ledger import Ledger, RankChanges
from megarl.reshard.checks.probe import TOLERANCES, check_logprobs, probe_prompt
from megarl.reshard.layouts.packed import checkpoint_names
from megarl.reshard.layouts.placed import Ends, reshard_ends
from megarl.reshard.layouts.vllm_slots import AdapterSlots, live_parameters, without_adapters
from megarl.reshard.live import DirectReshard, GatheredReshard, record
from megarl.reshard.plan import RankTopology
from megarl.reshard.staging import gathered
from megarl.training.parts.lora import LoraPart
from megarl.types import ConfigError, TrainingSequence

if TYPE_CHECKING:
    from megarl.engine.engine import RolloutEngine
    from megarl.training.training_engine import Snapshot, TrainingEngine

FIRST_VERSION = 1
"""Version of the weights before the first update: those of the model folder."""


class RankReshard:
    """Executes one rank's share of copying weights from trainers to engines.

    The rank has a `policy` (or a `snapshot` of it), an `engine`, or both. `topology` lists all ranks taking part,
    trainers first: the world's, or the ranks of `group`. `version` is the version of the current weights; None: one
    more than the engine's.

    Construction is a collective of all ranks. It plans the copies, copies all weights once and verifies them. Raises
    MegarlError naming the first wrong parameter.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: ParallelConfig,
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
        """Plan the copies of weights, execute them once and verify them.

        `transformer_engine` says whether the trainer uses Transformer Engine's layers; None on ranks without a trainer.
        `replica` is the number of this rank's engine, for messages.
        """
        self._recipe, self._parallel, self._topology = recipe, parallel, topology
        self._policy, self._engine, self._replica, self._group = policy, engine, replica, group
        self._snapshot = snapshot
        shape = read_model_shape(recipe.model.folder, recipe.override_of(recipe.model.folder))
        self._shape = shape.with_mtp(recipe.trains_mtp)
        # Without drafts the engines have no MTP layers.
        self._engine_shape = shape.with_mtp(recipe.drafts_with_mtp)
        self._transformer_engine = bool(
            # Only ranks with a trainer know it, so ask all ranks and take the first answer.
            next(known for known in gathered(transformer_engine, group) if known is not None)
        )
        self._recorded: Layout = ()
        """Layout of this rank's engine, as vLLM's loader fills it; empty if it cannot be written in place."""
        self.notices: list[str] = []
        """Texts for the user about how the weights are copied."""
        with self._in_memory(version):
            # Inside the context: planning and self-test need the live weights of both sides in memory.
            self.live_reshard = self._planned()
            self.first_report: dict[str, Any] = self.live_reshard.self_test()
            """Seconds and bytes of the first copy, by stage, and the checksums as `run` returns them."""
            if version in (None, FIRST_VERSION):
                self._compare_with_folder()
            self._ledger = self._engine_ledger()
            self._take_checksums(self.first_report, version or 1)
            trainer_logprobs = self._probe_trainer() if self._is_probed else None
        if self._is_probed:
            started = time.perf_counter()
            # After the context: the engine needs its KV cache to compute log-probs.
            self.first_report["probe_gap"] = self._check_probe(trainer_logprobs)
            self.first_report["verify_seconds"] = time.perf_counter() - started

    def run(self, *, verify: bool = False, version: int | None = None) -> dict[str, Any]:
        """Copy the trainer's weights into the engines. With `verify`, compare them. Returns seconds and bytes by stage.

        With `weights.check_every`, an engine's report has its new weights' `checksums`.

        The comparison of `verify` uses checksums. If an engine stores converted (such as quantised) weights, log-probs
        of a probe prompt are compared, and `probe_gap` is their mean distance in nats. Raises MegarlError with the
        first differing parameter, or with the rank of differing log-probs.
        """
        trainer_logprobs = None
        faults.reach("reshard")
        meet_seconds = self._meet()
        with self._in_memory(version):
            with span("move weights"):
                report: dict[str, Any] = self.live_reshard.run() | meet_seconds
            faults.reach("resharded", self._engine_weights)
            started = time.perf_counter()
            # Checksums need the weights in memory on both sides; converted weights have no equal bytes, so they are
            # probed.
            if verify and not isinstance(self.live_reshard, GatheredReshard):
                self.live_reshard.verify()
            elif verify:
                trainer_logprobs = self._probe_trainer()
            seconds = time.perf_counter() - started
            self._take_checksums(report, version or 1)
        if not verify:
            return report
        if self._is_probed:
            started = time.perf_counter()
            report["probe_gap"] = self._check_probe(trainer_logprobs)
            seconds += time.perf_counter() - started
        report["verify_seconds"] = seconds
        return report

    def compare_weights(self) -> RankChanges | None:
        """Return the changes of this rank's engine since the last copy, and drop its checksums. None without checksums.

        The engine must be awake.
        """
        if self._ledger is None:
            return None
        changes = self._ledger.compare()
        self._ledger.forget()
        return changes

    def _compare_with_folder(self) -> None:
        """Compare rows of the engine with the model folder, whose weights the trainers still have. A collective.

        Engines that convert their weights got them from vLLM's own loader by name: only their log-probs are compared.
        """
        if isinstance(self.live_reshard, GatheredReshard):
            return
        recipe, engine = self._recipe, self._engine
        folder = MappedFolder(recipe.model.folder)
        model: torch.nn.Module | None = None
        names: list[str] = []
        if engine is not None:
            model, in_folder = engine.model, checkpoint_names(self._engine_shape)
            recorded = {in_folder[piece.box.name] for piece in self._recorded}
            # Tensors in MXFP4 have other names in the files, and are not compared.
            names = sampled_names(recorded & folder.names, recipe.seed)
        dtype = getattr(torch, recipe.model.dtype)
        with without_adapters(model):
            check_rows(model, names, folder.tensor, dtype=dtype, seed=recipe.seed, group=self._group)

    def _engine_weights(self) -> Iterable[Tensor]:
        """Return the live parameters of this rank's engine; none without an engine."""
        return () if self._engine is None else live_parameters(self._engine.model).values()

    def _engine_ledger(self) -> Ledger | None:
        """Return the ledger of this rank's engine; None without an engine or without `weights.check_every`."""
        engine = self._engine
        if engine is None or not self._recipe.weights.check_every:
            return None
        first_rank = 0 if self._group is None else self._parallel.leaders()[self._replica]
        who = f"engine rank {first_rank + dist.get_rank()}"
        live = live_parameters(engine.model)
        if isinstance(self.live_reshard, DirectReshard) and not self.live_reshard.converts:
            return Ledger(who, self._recorded, live)
        adapter = engine.find_part(TrainedAdapter)
        slots = adapter.slots.tensors if adapter is not None and adapter.slots is not None else {}
        return Ledger.of_parameters(who, {**live, **slots})

    def _take_checksums(self, report: dict[str, Any], version: int) -> None:
        """Add the checksums of this rank's engine to a report, if those of this version are due."""
        if self._ledger is not None and self._recipe.weights.is_checked(version):
            report["checksums"] = self._ledger.take(version)

    def _meet(self) -> dict[str, float]:
        """Wait on the host until all ranks of the group are ready. Returns the waiting time as `meet_seconds`; empty
        without a group.

        A trainer sending in the background arrives before the engines have paused. If it started to send, NCCL kernels
        would wait on its GPU, occupying 16 to 32 multiprocessors during training.
        """
        if self._group is None:
            return {}
        started = time.perf_counter()
        with span("meet engines"):
            gathered(None, self._group)
        return {"meet_seconds": time.perf_counter() - started}

    def _planned(self) -> DirectReshard | GatheredReshard | AdapterReshard:
        """Plan the copies: in place, or via full tensors if the engine's weights cannot be written in place."""
        if self._recipe.sends_adapter:
            return self._planned_adapter()
        policy, engine = self._policy, self._engine
        dtype = getattr(torch, self._recipe.model.dtype)
        ends = reshard_ends(
            self._shape,
            self._parallel,
            len(self._topology),
            transformer_engine=self._transformer_engine,
            engine=self._engine_shape,
        )
        source = policy or self._snapshot
        parameters = source.weights if source is not None else {}
        model = engine.model if engine is not None else None
        recorded, refusal = record(model, self._engine_shape, dtype, self._group)
        self._recorded = recorded or ()
        if recorded is None and self._recipe.drafts_with_mtp:
            raise ConfigError(
                "rollout.vllm.speculative_config: the engine's weights, with those of its MTP layers, cannot be "
                f"written in place, because of {refusal}; leave the field out"
            )
        if recorded is None and self._recipe.rollout.quantization != "none":
            raise ConfigError(
                f"rollout.quantization = {self._recipe.rollout.quantization}: a reshard cannot write this engine's "
                f"weights in place ({refusal}). Change this, or set rollout.quantization=none"
            )
        if recorded is None and not self._recipe.rollout.recompute_kv:
            raise ConfigError(
                "rollout.recompute_kv = false: interrupted requests then stay in the engine during a reshard. But a "
                f"reshard cannot write this engine's weights in place ({refusal}), so it is checked with a probe "
                "prompt, which needs an engine without other requests; set rollout.recompute_kv=true"
            )
        if recorded is None and self._group is not None and self._recipe.weights.overlap:
            raise ConfigError(
                f"weights.overlap = true: a reshard cannot write this engine's weights in place ({refusal}), so it is "
                "checked by a forward pass of the trainer. With overlap, the trainer is training at that time; set "
                "weights.overlap=false"
            )
        if recorded is None:
            self.notices.append(
                "each reshard sends full tensors to the engine, which is slow, because the engine's weights cannot "
                f"be written in place ({refusal})"
            )
            return GatheredReshard(
                ends.sources,
                self._engine_shape,
                parameters,
                self._load if engine is not None else None,
                dtype=dtype,
                bucket_bytes=self._recipe.weights.bucket_mib << 20,
                topology=self._topology,
                first_engine=ends.first_engine,
                group=self._group,
            )
        return self._direct(ends, recorded, parameters, model)

    def _planned_adapter(self) -> AdapterReshard:
        """Plan the one copy of the base weights, and the copies of the LoRA adapter into the engines' slots."""
        policy, engine, lora = self._policy, self._engine, self._recipe.lora
        dtype = getattr(torch, self._recipe.model.dtype)
        model = engine.model if engine is not None else None
        in_engine = engine.find_part(TrainedAdapter) if engine is not None else None
        slots = in_engine.slots if in_engine is not None else None
        with without_adapters(model):
            recorded, refusal = record(model, self._engine_shape, dtype, self._group)
        base, adapter = (
            reshard_ends(
                self._engine_shape,
                self._parallel,
                len(self._topology),
                transformer_engine=self._transformer_engine,
                adapter=which,
            )
            for which in (None, lora)
        )
        # The projections of a fused layer share one A, so the adapter has fewer matrices in the slots than in a folder.
        shapes = adapter_shapes(self._engine_shape, lora.targets, lora.rank)
        matrices = {tensor.name: shapes[tensor.name] for tensor in adapter.destinations.tensors}
        self._recorded = recorded or ()
        in_slots, no_slots = record_slots(slots, matrices, dtype, self._group)
        if recorded is None or in_slots is None:
            raise ConfigError(
                f"lora.sync = adapter: this engine's tensors cannot be written in place ({refusal or no_slots}); set "
                "lora.sync=merged"
            )
        weights = policy.tensors if policy is not None else {}
        trained_adapters = policy.find_part(LoraPart) if policy is not None else None
        matrices_sent = trained_adapters.scaled_adapters.weights if trained_adapters is not None else {}
        return AdapterReshard(
            self._direct(base, recorded, weights, model),
            lambda: self._direct(adapter, in_slots, matrices_sent, slots=slots),
        )

    def _direct(
        self,
        ends: Ends,
        recorded: Layout,
        parameters: Mapping[str, Tensor],
        model: torch.nn.Module | None = None,
        slots: AdapterSlots | None = None,
    ) -> DirectReshard:
        """Plan copies into the live parameters of `model`, or into the `slots` of a LoRA adapter."""
        return DirectReshard(
            ends.sources,
            ends.destinations,
            recorded,
            parameters,
            model,
            dtype=getattr(torch, self._recipe.model.dtype),
            bucket_bytes=self._recipe.weights.bucket_mib << 20,
            topology=self._topology,
            group=self._group,
            slots=slots,
        )

    @contextmanager
    def _in_memory(self, version: int | None) -> Iterator[None]:
        """Context with only the weights of trainer and engine in device memory. Afterwards the engine can sample.

        A trainer without an engine on its device keeps everything else there too.
        """
        policy, engine = self._policy, self._engine
        with ExitStack() as stack:
            if policy is not None:
                if engine is not None:
                    # Gradients and optimizer state leave the device to make room for the engine's weights.
                    policy.offload(but=("parameters",))
                    # Until here the device held the update's memory, which is part of the update's peak.
                    peak_memory.restart_peak()
                policy.onload(("parameters",))
            if engine is not None:
                with self._engine_errors_marked():
                    engine.wake(["weights"])
            if policy is not None:
                # What is sent exists for the time of the reshard only: merged weights, or scaled adapters.
                adapters = policy.find_part(LoraPart) if self._recipe.sends_adapter else None
                stack.enter_context(policy.merging() if adapters is None else adapters.scaled_adapters.valid())
            yield
        if engine is not None:
            if policy is not None:
                policy.offload()
            # The KV cache is memory of the rollout.
            peak_memory.settle_peak()
            with self._engine_errors_marked():
                # The KV cache last: it fits only after the trainer has left the device.
                engine.wake(["kv_cache"])
                engine.weights_updated(version)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Pass tensors to the engine's weight loader as they arrive. Errors of the transfer are raised unchanged."""
        failed: list[Exception] = []

        def incoming() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from tensors
            except Exception as error:
                failed.append(error)
                raise

        assert self._engine is not None
        try:
            with self._engine_errors_marked():
                self._engine.load_tensors(incoming())
        except ReplicaCollectiveError:
            if failed:
                # The engine failed only because its input did: raise the cause, which may name a lost rank.
                raise failed[0] from None
            raise

    def _engine_errors_marked(self) -> AbstractContextManager[None]:
        """Return a context that marks errors of collectives in the engine's own torch world. Other errors come from the
        group with the trainers.
        """
        return nullcontext() if self._group is None else replica_collectives_marked()

    @property
    def _is_probed(self) -> bool:
        """Whether copies are verified by log-probs of a probe prompt, because the engines store converted weights.

        Otherwise checksums of the weights are compared.
        """
        return isinstance(self.live_reshard, GatheredReshard)

    def _probe_trainer(self) -> NDArray[np.float32] | None:
        """Compute the trainer's log-probs of the probe prompt, float32 [prompt]. A collective.

        Only the ranks reporting results return them; the others return None.
        """
        # Synchronise first. If an engine left and some trainers noticed, the others must not start waiting for them.
        gathered(None, self._group)
        if self._policy is None:
            return None
        prompt = self._probe_prompt()
        row = TokenBatch.from_sequences([TrainingSequence(prompt, np.arange(len(prompt)) > 0)])
        # A forward pass needs a multiple of this many rows; repeat the prompt to fill them.
        found = self._policy.forward([row] * self._parallel.rows_multiple)
        return found[0] if found else None

    def _check_probe(self, trainer_logprobs: NDArray[np.float32] | None) -> float:
        """Compare the engines' log-probs of the probe prompt with the trainer's. Returns the mean distance in nats."""
        tolerance = self._recipe.weights.probe_tolerance or TOLERANCES[self._recipe.model.dtype]
        with self._engine_errors_marked():
            logprobs = None if self._engine is None else self._engine.prompt_logprobs(self._probe_prompt())
        return check_logprobs(
            trainer_logprobs,
            logprobs,
            replica=self._replica,
            tolerance=tolerance,
            group=self._group,
        )

    def _probe_prompt(self) -> NDArray[np.int64]:
        """Return the token ids of the probe prompt, with which copied weights are verified: int64 [prompt]."""
        # One token less: vLLM samples one token after a prompt even if only its log-probs are needed.
        return probe_prompt(self._shape.vocab_size, self._recipe.trained_tokens - 1)
