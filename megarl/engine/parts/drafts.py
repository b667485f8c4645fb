"""Speculative decoding in an engine: counts drafted and accepted tokens, and loads the draft layers of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megarl.engine.parts.engine_part import EnginePart
from megarl.families.draft_layers import DRAFTER
from megarl.files.model_folder import find_folder
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Mean, Metric

METRICS = (
    MetricRow(
        "perf/drafts_accepted",
        "share",
        "fraction of drafted tokens accepted by the policy (speculative decoding)",
        condition="rollout.vllm.speculative_config",
    ),
    MetricRow(
        "perf/accepted_length",
        "tokens",
        "mean tokens gained by a request in an engine step that verified drafts: accepted drafts and one more",
        condition="rollout.vllm.speculative_config",
    ),
)


class Drafts(EnginePart):
    """Part that counts drafts, and loads the weights of a draft model, if there is one.

    `is_drafter_tensor(name)` returns whether the draft model loads this tensor of the checkpoint.
    """

    def __init__(self, is_drafter_tensor: Callable[[str], bool]) -> None:
        self._is_drafter_tensor = is_drafter_tensor
        self._counts = DraftCounts()
        self._model: ModelWithDrafter | None = None

    def start(self, scheduler: Any) -> None:
        # vLLM calls this at each verification of drafts. Its own function counts only with its statistics enabled.
        scheduler.make_spec_decoding_stats = self._counts.count

    def wrap_model(self, worker: Any, model: nn.Module) -> nn.Module:
        drafter = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
        if drafter is None:
            return model
        self._model = ModelWithDrafter(model, drafter, self._is_drafter_tensor)
        return self._model

    def extend_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        return tensors if self._model is None else self._model.yield_then_load_drafts(tensors)

    def take_metrics(self) -> dict[str, Metric]:
        return self._counts.take_metrics()


class FrozenDrafts(Drafts):
    """Drafts of a published drafter (EAGLE-3). vLLM loads the drafter's files. Reshards do not write it.

    `config` is vLLM's `speculative_config`.
    """

    sleep_reason = "no reshard writes the drafter of rollout.vllm.speculative_config"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(lambda name: False)
        self._config = config
        self._drafter: nn.Module | None = None

    def revise_arguments(self, vllm_config: Any) -> Mapping[str, Any]:
        # With dummy weights vLLM 0.30 would let any drafter use the policy's embedding and head.
        drafter_settings = {
            "model": find_folder(self._config["model"]),
            "draft_load_config": {"load_format": "safetensors"},
        }
        return {"speculative_config": {**self._config, **drafter_settings}}

    def wrap_model(self, worker: Any, model: nn.Module) -> nn.Module:
        # Leave the drafter out of the returned model, so that no reshard writes its head or embedding.
        self._drafter = worker.model_runner.drafter.model
        return model

    def further_tensors(self) -> Iterable[torch.Tensor]:
        return () if self._drafter is None else self._drafter.parameters()


class TrainedDrafts(FrozenDrafts):
    """Drafts of an EAGLE-3 drafter trained with the policy.

    vLLM loads its first weights and the vocabulary maps from the drafter's own files. Each reshard then writes
    `written`.
    """

    sleep_reason = "no reshard writes the maps of the drafter's vocabulary"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.written: OwnParameters | None = None
        """Parts of the drafter that a reshard writes; None before the start."""

    def wrap_model(self, worker: Any, model: nn.Module) -> nn.Module:
        model = super().wrap_model(worker, model)
        assert self._drafter is not None
        self.written = OwnParameters(self._drafter)
        return model


class OwnParameters(nn.Module):
    """The parameters of vLLM's EAGLE-3 drafter, without the policy's embedding and the vocabulary map."""

    def __init__(self, drafter: Any) -> None:
        """Collect the modules that the drafter does not share with the policy."""
        super().__init__()
        # A tuple hides the drafter from torch: its parameters are not added to this module's.
        self._loader: tuple[Any] = (drafter,)
        self.lm_head = drafter.lm_head
        self.model = nn.Module()
        for name, child in drafter.model.named_children():
            # vLLM 0.30 lends the policy's embedding to a drafter without one. Do not write it as the drafter's.
            if name != "embed_tokens":
                self.model.add_module(name, child)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors [any shape] by their published names, through vLLM's own loader."""
        (drafter,) = self._loader
        drafter.load_weights(weights)


class ModelWithDrafter(nn.Module):
    """A vLLM model with its draft model: the model's parts under their own names, the draft model as `DRAFTER`.

    vLLM 0.30 shares embedding and head between both, so each is one parameter. `is_drafter_tensor(name)` returns
    whether the draft model loads this tensor of the checkpoint.
    """

    def __init__(self, model: nn.Module, drafter: nn.Module, is_drafter_tensor: Callable[[str], bool]) -> None:
        super().__init__()
        self._loaders: tuple[Any, Any] = (model, drafter)
        self._is_drafter_tensor = is_drafter_tensor
        for name, child in model.named_children():
            self.add_module(name, child)
        self.add_module(DRAFTER.rstrip("."), drafter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors [any shape] of both models by vLLM's loaders. Returns the loaded names."""
        tensors = list(weights)
        model, drafter = self._loaders
        draft_tensors = [(name, tensor) for name, tensor in tensors if self._is_drafter_tensor(name)]
        return model.load_weights(tensors) | {DRAFTER + name for name in drafter.load_weights(draft_tensors)}

    def yield_then_load_drafts(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield checkpoint tensors [any shape] for the policy's loader. After the last one, load the draft model's
        tensors.
        """
        draft_tensors = []
        for name, tensor in weights:
            if self._is_drafter_tensor(name):
                draft_tensors.append((name, tensor))
            yield name, tensor
        with torch.no_grad():
            _, drafter = self._loaders
            drafter.load_weights(draft_tensors)


class DraftCounts:
    """Counts of speculative decoding since the last reset: verifications, drafted and accepted tokens.

    A verification is one step of one request with drafts. It yields the accepted drafts and one more token.
    """

    def __init__(self) -> None:
        self._num_verifications = self._num_drafted = self._num_accepted = 0

    def count(
        self,
        spec_decoding_stats: None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Mapping[str, int] | None,
        request_id: str,
    ) -> None:
        """Count one verification. Replaces vLLM's `Scheduler.make_spec_decoding_stats`."""
        num_drafted = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_drafted > 0:
            self._num_verifications += 1
            self._num_drafted += num_drafted
            self._num_accepted += num_accepted_tokens

    def take_metrics(self) -> dict[str, Metric]:
        """Return metrics weighted by drafts and verifications, and reset the counts."""
        if not self._num_drafted:
            return {}
        metrics: dict[str, Metric] = {
            "perf/drafts_accepted": Mean(self._num_accepted / self._num_drafted, self._num_drafted),
            "perf/accepted_length": Mean(1 + self._num_accepted / self._num_verifications, self._num_verifications),
        }
        self._num_verifications = self._num_drafted = self._num_accepted = 0
        return metrics
