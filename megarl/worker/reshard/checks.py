"""Checks of the weights that one rank's reshards copied: log-probs of a probe prompt, the model folder, checksums."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.checkpoint.mapped import MappedFolder
from megarl.data.token_batch import TokenBatch
from megarl.engine.parts.drafts import TrainedDrafts
from megarl.engine.parts.trained_adapter import TrainedAdapter
from megarl.families.draft_layers import DRAFTER
from megarl.groups.peer_errors import engine_collectives_marked
from megarl.reshard.boxes import with_prefix
from megarl.reshard.checks.file_rows import check_rows, sample_names
from megarl.reshard.checks.ledger import Ledger, RankChanges, RankChecksums
from megarl.reshard.checks.probe import TOLERANCES, check_logprobs, probe_prompt
from megarl.reshard.layouts.packed import checkpoint_names
from megarl.reshard.layouts.vllm_slots import live_parameters, without_adapters
from megarl.reshard.staging import gather_values
from megarl.types import TrainingSequence
from megarl.worker.reshard.planning import ReshardEnds, ReshardPlan


class ReshardChecks:
    """Checks of an engine's weights after the reshards of a `plan`, on a rank with one or both `reshard_ends`."""

    def __init__(self, reshard_ends: ReshardEnds, plan: ReshardPlan) -> None:
        self._reshard_ends, self._plan = reshard_ends, plan
        self.is_probed = plan.live_reshard.is_probed
        """Whether log-probs of a probe prompt verify the copies, because the engines convert their weights."""
        self._trainer_logprobs: NDArray[np.float32] | None = None
        self.ledger = self._make_ledger()
        """Checksums of this rank's engine; None without an engine or without `weights.check_every`."""

    def compare_with_folder(self) -> None:
        """Compare rows of the engine's weights with the model folder. A collective.

        Call it while the trainers still have the folder's weights. If `is_probed`, nothing is compared: then vLLM's own
        loader gets each tensor by its name, and converts it.
        """
        if self.is_probed:
            return
        recipe, engine = self._reshard_ends.recipe, self._reshard_ends.engine
        folder = MappedFolder(recipe.model.folder)
        model: torch.nn.Module | None = None
        compared_names: list[str] = []
        if engine is not None:
            model, name_in_folder = engine.model, checkpoint_names(self._plan.engine_shape)
            written_names = {name_in_folder[piece.box.name] for piece in self._plan.recorded}
            # Tensors in MXFP4 have other names in the files, and are not compared.
            compared_names = sample_names(written_names & folder.names, recipe.seed)
        dtype = getattr(torch, recipe.model.dtype)
        with without_adapters(model):
            check_rows(
                model, compared_names, folder.tensor, dtype=dtype, seed=recipe.seed, group=self._reshard_ends.group
            )

    def take_ledger(self, version: int) -> RankChecksums | None:
        """Return the checksums of this rank's engine; None if this version is not checked."""
        if self.ledger is None or not self._reshard_ends.recipe.weights.is_checked(version):
            return None
        return self.ledger.take_checksums(version)

    def compare_weights(self) -> RankChanges | None:
        """Return the changes of this rank's engine since the last copy, and drop its checksums.

        None without checksums. The engine must be awake.
        """
        if self.ledger is None:
            return None
        changes = self.ledger.find_changes()
        self.ledger.forget()
        return changes

    def start_probe(self) -> None:
        """Compute the trainer's log-probs of the probe prompt, if copies are probed. A collective.

        The trainer's weights must be in device memory.
        """
        if not self.is_probed:
            return
        # Synchronise first. Otherwise, after the loss of an engine, some trainers would notice it and leave, and others
        # would wait for them.
        gather_values(None, self._reshard_ends.group)
        policy = self._reshard_ends.policy
        if policy is None:
            return
        prompt = self._probe_prompt()
        row = TokenBatch.from_sequences([TrainingSequence(prompt, np.arange(len(prompt)) > 0)])
        # A forward pass needs a multiple of this many rows, so repeat the prompt.
        logprobs = policy.forward([row] * self._reshard_ends.parallel.rows_multiple)
        # Only the ranks reporting results have log-probs.
        self._trainer_logprobs = logprobs[0] if logprobs else None

    def finish_probe(self) -> float | None:
        """Compare the engines' log-probs of the probe prompt with the trainer's, if copies are probed. A collective.

        Returns the mean distance in nats. The engine needs its KV cache.
        """
        if not self.is_probed:
            return None
        recipe, engine = self._reshard_ends.recipe, self._reshard_ends.engine
        tolerance = recipe.weights.probe_tolerance or TOLERANCES[recipe.model.dtype]
        with engine_collectives_marked(self._reshard_ends.group):
            logprobs = None if engine is None else engine.prompt_logprobs(self._probe_prompt())
        return check_logprobs(
            self._trainer_logprobs,
            logprobs,
            replica=self._reshard_ends.replica,
            tolerance=tolerance,
            group=self._reshard_ends.group,
        )

    def _probe_prompt(self) -> NDArray[np.int64]:
        """Return the token ids of the probe prompt: int64 [prompt]."""
        # One token less than trained, because vLLM samples one token even if only the prompt's log-probs are needed.
        return probe_prompt(self._plan.engine_shape.vocab_size, self._reshard_ends.recipe.trained_tokens - 1)

    def _make_ledger(self) -> Ledger | None:
        """Return the ledger (checksums by weight version) of this rank's live vLLM parameters; None without checks."""
        reshard_ends, engine = self._reshard_ends, self._reshard_ends.engine
        if engine is None or not reshard_ends.recipe.weights.check_every:
            return None
        first_rank = 0 if reshard_ends.group is None else reshard_ends.parallel.leaders()[reshard_ends.replica]
        owner = f"engine rank {first_rank + dist.get_rank()}"
        draft_part = engine.find_part(TrainedDrafts)
        drafter_parameters = (
            {} if draft_part is None or draft_part.written is None else live_parameters(draft_part.written)
        )
        # Both models have parameters of the same names, such as lm_head.weight, so prefix the drafter's.
        live_tensors = live_parameters(engine.model) | {
            DRAFTER + name: parameter for name, parameter in drafter_parameters.items()
        }
        # Without a conversion, the plan's boxes are parts of the live tensors. Else each whole parameter is one box.
        if not self._plan.live_reshard.converts:
            recorded_drafter = with_prefix(self._plan.recorded_drafter, box_prefix=DRAFTER, storage_prefix=DRAFTER)
            return Ledger(owner, self._plan.recorded + recorded_drafter, live_tensors)
        adapter_part = engine.find_part(TrainedAdapter)
        slots = adapter_part.slots.tensors if adapter_part is not None and adapter_part.slots is not None else {}
        return Ledger.of_parameters(owner, {**live_tensors, **slots})
