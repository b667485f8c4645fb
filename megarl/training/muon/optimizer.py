"""An optimizer with two rules: Muon for whole matrices, Adam for the other parameters.

Megatron builds Adam and shards the parameters. Then `MuonWithAdam` takes Adam's place. Momentum and main weights of
matrices stay sharded like Adam's state; only the orthogonal update needs whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import (
    Adam,  # pyright: ignore[reportAttributeAccessIssue]  (it is whichever package's Megatron found)
    ChainedOptimizer,
    ParamKey,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import Tensor
from torch.distributed import get_process_group_ranks

from megarl.algorithms.muon import add_gradient, apply_update, newton_schulz_flops, orthogonal_update
from megarl.config import OptimizerConfig
from megarl.families.shape import padded_vocab_size
from megarl.families.tensors.matrices import matrix_templates
from megarl.models.configuration import uses_transformer_engine
from megarl.reshard.boxes import Layout, cut_piece
from megarl.reshard.layouts.megatron import megatron_layouts
from megarl.reshard.staging import gather_values
from megarl.training.model import ModelShard
from megarl.training.muon.exchange import MatrixExchange

MOMENTUM = "momentum_buffer"
"""Name of Muon's momentum in an optimizer's state and in checkpoints. Adam's moments have other names."""
_IS_MATRIX = "is_matrix"
"""Key of a parameter group whose parameters are matrices."""
_Ranges = Mapping[str, tuple[int, int]]
"""Flat range (first element, end) of each parameter that a rank's optimizer updates, by Megatron's name."""


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for the groups of matrices, `adam` for all other groups.

    `run_exchange` replaces the matrices in all ranks' gradients by their orthogonal updates.
    """

    def __init__(self, adam: torch.optim.Optimizer, config: OptimizerConfig, run_exchange: Callable[[], None]) -> None:
        # torch's constructor refuses views, and Megatron's flat shards of parameters are views.
        super().__init__([{"params": []}], adam.defaults)
        self.param_groups = adam.param_groups
        self.adam, self._config, self._run_exchange = adam, config.muon, run_exchange
        self._counts_in_groups = not isinstance(adam, torch.optim.Adam | torch.optim.AdamW)
        """Whether Adam counts its steps in parameter groups, like Transformer Engine's and apex's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step Adam on its groups.

        Then update the matrices: momentum, exchange for orthogonal updates, change of the weights.
        """
        assert closure is None
        # Repeated in each step, because loading a state replaces groups and state.
        self.adam.param_groups = [group for group in self.param_groups if not group.get(_IS_MATRIX)]
        self.adam.state = self.state
        self.adam.step()
        for _, parameter, gradient in self._iterate_matrices():
            state = self.state[parameter]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(parameter)
            add_gradient(state[MOMENTUM], gradient, self._config.momentum, nesterov=self._config.nesterov)
        # Orthogonal updates need whole matrices, so the gradients must contain all momentum by now.
        self._run_exchange()
        for group, parameter, gradient in self._iterate_matrices():
            apply_update(parameter, gradient, group["lr"], group["weight_decay"])
        self._count_step()

    def allocate_state(self) -> None:
        """Allocate missing state as zeros: the momentum of matrices, the moments of other parameters."""
        for group in self.param_groups:
            names = (MOMENTUM,) if group.get(_IS_MATRIX) else ("exp_avg", "exp_avg_sq")
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in names:
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)

    def _iterate_matrices(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            if group.get(_IS_MATRIX):
                yield from ((group, parameter, parameter.grad) for parameter in group["params"])

    def _count_step(self) -> None:
        """Count a step for the matrices like Adam: Megatron requires equal counts in a checkpoint."""
        if self._counts_in_groups:
            for group in self.param_groups:
                if group.get(_IS_MATRIX):
                    group["step"] = group.get("step", 0) + 1
            return
        for _, parameter, _ in self._iterate_matrices():
            state = self.state[parameter]
            state["step"] = state.get("step", torch.zeros(())) + 1


class MuonRule:
    """Divides a model's parameters between Muon and Adam, and replaces Adam by `MuonWithAdam`."""

    def __init__(self, shard: ModelShard, config: OptimizerConfig) -> None:
        """Find this rank's trained parameters that are matrices."""
        self._shard, self._config = shard, config
        self._layouts = megatron_layouts(
            shard.shape,
            shard.parallel,
            padded_vocab_size=padded_vocab_size(shard.shape.vocab_size, shard.parallel.tp),
            transformer_engine=uses_transformer_engine(),
        )
        self._shapes = matrix_templates(self._layouts.rules)
        self._rank = torch.distributed.get_rank()
        matrix_names = {piece.storage for piece in self._list_pieces(self._rank)}
        trained_parameters = {
            name: parameter for name, parameter in shard.parameters.items() if parameter.requires_grad
        }
        self._parameters = {name: parameter for name, parameter in trained_parameters.items() if name in matrix_names}

    def param_group_overrides(self, settings: MegatronOptimizerConfig) -> dict[ParamKey, Any]:
        """Return Megatron's overrides: parameter groups for the matrices, and Adam's learning rate for all other
        groups.
        """
        # Sets of ids, because `==` compares tensors element by element.
        matrix_ids = {id(parameter) for parameter in self._parameters.values()}
        rate_factor = self._config.muon.adam_rate
        rates = {
            "max_lr": self._config.learning_rate * rate_factor,
            "min_lr": self._config.min_learning_rate * rate_factor,
        }

        def group_key(name: str, *, is_matrix: bool) -> ParamKey:
            return ParamKey(
                predicate=ParamPredicate(name, lambda parameter: (id(parameter) in matrix_ids) is is_matrix)
            )

        return {
            **get_standard_config_overrides(settings),
            # Megatron-Core 0.16.1 identifies groups in a checkpoint by a few keys, such as `is_decoupled_lr`.
            group_key("matrices", is_matrix=True): {_IS_MATRIX: True, "is_decoupled_lr": True},
            **({} if rate_factor == 1 else {group_key("other parameters", is_matrix=False): rates}),
        }

    def replace_adam(self, optimizer: ChainedOptimizer) -> None:
        """Replace Adam in all parts of an optimizer. A collective over the ranks of the pipeline stage."""
        optimizer_parts: list[Any] = optimizer.chained_optimizers
        for optimizer_part in optimizer_parts:
            # Megatron makes a stub without an optimizer if a part has no parameters.
            if optimizer_part.optimizer is None:
                continue
            assert isinstance(optimizer_part.optimizer, Adam)
            optimizer_part.optimizer = MuonWithAdam(
                optimizer_part.optimizer, self._config, self._make_exchange(optimizer_part)
            )
            # Megatron-Core 0.16.1 would allocate Adam's two moments for every parameter here, matrices too.
            optimizer_part.init_state_fn = lambda inner, config=None: inner.allocate_state()

    def _make_exchange(self, optimizer_part: Any) -> Callable[[], None]:
        """Return a function that replaces matrices, in all ranks' gradients, by orthogonal updates.

        `optimizer_part` is Megatron's optimizer of the dense or of the experts' parameters.
        """
        has_experts = any(group["is_expert_parallel"] for group in optimizer_part.optimizer.param_groups)
        # Megatron sets `allreduce` to False on parameters of parallel experts; others may have no such attribute.
        parameters = {
            name: parameter
            for name, parameter in self._parameters.items()
            if has_experts is not getattr(parameter, "allreduce", True)
        }
        # All ranks of this pipeline stage: other stages have none of these matrices.
        group: Any = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        ranges = gather_values(_ranges_on_rank(optimizer_part, parameters), group)
        layouts = [
            tuple(self._cut_pieces(rank, rank_ranges))
            for rank, rank_ranges in zip(get_process_group_ranks(group), ranges, strict=True)
        ]
        shapes = {
            tensor.name: self._shapes[tensor.template]
            for tensor in self._layouts.tensors
            if tensor.template in self._shapes
        }
        muon = self._config.muon
        exchange = MatrixExchange(
            layouts,
            shapes,
            {name: newton_schulz_flops(*shape, muon.coefficients) for name, shape in shapes.items()},
            _gradients_by_name(parameters),
            device=self._shard.device,
            group=group,
        )
        update = partial(
            orthogonal_update,
            coefficients=muon.coefficients,
            scale=muon.scale,
            factor=muon.scale_factor,
            dtype=getattr(torch, muon.products),
        )
        return partial(exchange.run, update)

    def _list_pieces(self, rank: int) -> Layout:
        """Return the pieces of matrices on a rank, with Megatron's parameter name as storage."""
        return tuple(
            holding.piece(tensor)
            for tensor in self._layouts.tensors
            if tensor.template in self._shapes
            for holding in self._layouts.holdings(tensor)
            if rank in holding.ranks
        )

    def _cut_pieces(self, rank: int, ranges: _Ranges) -> Iterable[Any]:
        for piece in self._list_pieces(rank):
            if piece.storage in ranges:
                yield from cut_piece(piece, *ranges[piece.storage])


def _gradients_by_name(parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.main_grad for name, parameter in parameters.items()}


def _ranges_on_rank(optimizer_part: Any, parameters: Mapping[str, Tensor]) -> _Ranges:
    """Return the flat range (first element, end) of each parameter that this rank's shard of `optimizer_part`
    updates.
    """
    if not isinstance(optimizer_part, DistributedOptimizer):
        return {name: (0, parameter.numel()) for name, parameter in parameters.items()}
    gradient_ranges: Any = optimizer_part.gbuf_ranges
    ranges = {
        parameter: range_map["param"]
        for buffers in gradient_ranges
        for buckets in buffers.values()
        for bucket in buckets
        for parameter, range_map in bucket["param_map"].items()
    }
    # If this rank's shard has no element of a parameter, the rank's map lacks the parameter.
    return {
        name: (ranges[parameter].start, ranges[parameter].end)
        for name, parameter in parameters.items()
        if parameter in ranges
    }
