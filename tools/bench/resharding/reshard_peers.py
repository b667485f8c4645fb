"""What the reshard is measured against: full tensors gathered over gloo, and `megatron.core.resharding` itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megarl.config.parallel import ParallelConfig
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule
from megarl.reshard.layouts.megatron import MegatronLayouts


def rules_by_parameter(layouts: MegatronLayouts, rank: int) -> dict[str, tuple[Rule, str]]:
    """Return the rule of each of a rank's parameters, and its name with the model's layer number."""
    coordinates = layouts.parallel.coordinates(rank)
    rules = {}
    for chunk in (chunk for chunk in layouts.chunks if chunk.stage == coordinates.pp):
        for rule in layouts.rules:
            layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
            if rule.place != "every_layer":
                layers = (-1,) if chunk in layouts.chunks_of(rule) else ()
            slot = layouts.storage_pattern(rule, chunk, coordinates.ep)
            for layer in layers:
                rules[slot.find_storage(TensorName("", layer))[0]] = (
                    rule,
                    rule.parameter.format(layer=layer, expert=0),
                )
    return rules


class Gathered:
    """Each parameter gathered over its tensor-parallel ranks, sent to the other stages, and sliced by every engine.

    Writes vLLM's parameters from Megatron's, as frameworks do that export full tensors. Slices are taken from the
    gathered parts directly: no full tensor is put together first.
    """

    def __init__(
        self,
        layouts: MegatronLayouts,
        rollout_tp: int,
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
    ) -> None:
        self._sources, self._destinations = sources, destinations
        self._model, self._parallel = layouts.model, layouts.parallel
        self._layouts, self._rank = layouts, dist.get_rank()
        self._engine_tp, self._engine_rank = rollout_tp, self._rank % rollout_tp
        parallel = self._parallel
        self._tp = _own_group([[parallel.rank(t, 0, p) for t in range(parallel.tp)] for p in range(parallel.pp)])
        self._pp = _own_group([[parallel.rank(t, 0, p) for p in range(parallel.pp)] for t in range(parallel.tp)])

    def run(self) -> None:
        coordinates = self._parallel.coordinates(self._rank)
        for stage in range(self._parallel.pp):
            first = self._parallel.rank(coordinates.tp, 0, stage)
            for name, (rule, full_name) in rules_by_parameter(self._layouts, first).items():
                shape = self._shape(rule)
                parts = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(self._splits(rule))]
                if stage == coordinates.pp and rule.dim is not None:
                    dist.all_gather(parts, self._sources[name], group=self._tp)
                elif stage == coordinates.pp:
                    parts = [self._sources[name]]
                if self._parallel.pp > 1:
                    for part in parts:
                        dist.broadcast(part, first, group=self._pp)
                self._write_share(full_name, rule, parts)

    def _splits(self, rule: Rule) -> int:
        return 1 if rule.dim is None else self._parallel.tp

    def _shape(self, rule: Rule) -> tuple[int, ...]:
        shape = list(rule.tensors[0][1])
        shape[rule.dim or 0] = sum(self._layouts.part_lengths(rule))
        return tuple(shape)

    def _write_share(self, name: str, rule: Rule, parts: list[torch.Tensor]) -> None:
        """Write this engine rank's share of one Megatron parameter, gathered as `parts`."""
        model, tp, rank = self._model, self._engine_tp, self._engine_rank
        if "linear_qkv.weight" in name:
            group = model.num_heads // model.num_kv_heads + 2
            heads = torch.cat(parts).view(model.num_kv_heads, group, model.head_dim, -1)
            own_heads = heads[rank * model.num_kv_heads // tp : (rank + 1) * model.num_kv_heads // tp]
            pieces = [
                part.reshape(-1, model.hidden_size) for part in (own_heads[:, :-2], own_heads[:, -2], own_heads[:, -1])
            ]
            self._write(name, pieces)
        elif "linear_fc1.weight" in name:
            halves = [part.chunk(2) for part in parts]
            rows = model.intermediate_size // tp
            self._write(name, [_join_range([h[i] for h in halves], rank * rows, rows) for i in (0, 1)])
        elif rule.padded:
            target = self._destinations[_vllm_name(name)]
            rows = -(-model.vocab_size // 64) * 64 // tp
            self._write(name, [_join_range(parts, rank * rows, len(target))])
        elif rule.dim == 1:
            columns = parts[0].shape[1] * len(parts) // tp
            self._write(name, [_join_range(parts, rank * columns, columns, dim=1)])
        else:
            self._write(name, parts)

    def _write(self, name: str, pieces: list[torch.Tensor]) -> None:
        target, start = self._destinations[_vllm_name(name)], 0
        for piece in pieces:
            target[start : start + len(piece)].copy_(piece)
            start += len(piece)


def _join_range(parts: list[torch.Tensor], start: int, length: int, dim: int = 0) -> torch.Tensor:
    """Return `length` rows from `start` on, of the parts joined along `dim`."""
    pieces, size = [], parts[0].shape[dim]
    for index, part in enumerate(parts):
        low, high = max(start, index * size), min(start + length, (index + 1) * size)
        if low < high:
            pieces.append(part.narrow(dim, low - index * size, high - low))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _vllm_name(megatron_name: str) -> str:
    for old, new in {
        "embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head", "decoder.final_layernorm":
        "model.norm", "decoder.layers": "model.layers", "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_qkv": "self_attn.qkv_proj", "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm",
        "mlp.linear_fc1": "mlp.gate_up_proj", "mlp.linear_fc2": "mlp.down_proj",
    }.items():  # fmt: skip
        megatron_name = megatron_name.replace(old, new)
    return megatron_name


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all groups, as every rank must, and return the one that this rank is in."""
    # Keep the order of `ranks`: permuted ranks are not ascending, but their parts are.
    process_groups = [dist.new_group(ranks, sort_ranks=False) for ranks in groups]
    return next(
        group for group in process_groups if isinstance(group, dist.ProcessGroup)
    )  # of the others, a rank has a number


def import_megatron() -> Any:
    """Return Megatron's `swap_model_weights`, patched for a CPU, because its gloo service makes a CUDA stream."""
    from megarl.platform import libraries

    libraries.prepare_megatron()
    from megatron.core.resharding import swap_model_weights

    return swap_model_weights


class MegatronResharding:
    """`swap_model_weights` with its own planner and its own gloo service, over modules that hold our tensors."""

    def __init__(
        self,
        source_layouts: MegatronLayouts,
        destination_layouts: MegatronLayouts,
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
    ) -> None:
        self._swap = import_megatron()
        self._source = _megatron_module(source_layouts, sources)
        self._destination = _megatron_module(destination_layouts, destinations)

    def run(self) -> None:
        self._swap(self._source, self._destination, "gloo")


def _megatron_module(layouts: MegatronLayouts, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a module tree with Megatron's names, attributes and process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    root: Any = nn.Module()
    rank = dist.get_rank()
    for name, (rule, full_name) in rules_by_parameter(layouts, rank).items():
        parameter: Any = nn.Parameter(tensors[name], requires_grad=False)
        parameter.tensor_model_parallel = rule.dim is not None
        if rule.dim is not None:
            parameter.partition_dim, parameter.partition_stride = rule.dim, len(rule.blocks)
        node, (*path, last), full_path = root, name.split("."), full_name.split(".")
        for part, full_part in zip(path, full_path, strict=False):
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node._modules[part]
            if part.isdigit():
                node.layer_number = int(full_part) + 1
        node.register_parameter(last, parameter)
    root.config = SimpleNamespace(num_moe_experts=None)
    root.pg_collection = ProcessGroupCollection()
    for axis, groups in _grid(layouts.parallel):
        setattr(root.pg_collection, axis, _own_group(groups))
    return root


def _grid(parallel: ParallelConfig) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the ranks of every tensor-, pipeline- and data-parallel group."""
    tp, pp, dp = range(parallel.tp), range(parallel.pp), range(parallel.dp)
    yield "tp", [[parallel.rank(t, d, p) for t in tp] for p in pp for d in dp]
    yield "pp", [[parallel.rank(t, d, p) for p in pp] for t in tp for d in dp]
    yield "dp", [[parallel.rank(t, d, p) for d in dp] for t in tp for p in pp]
