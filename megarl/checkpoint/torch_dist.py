"""Megatron-Core's distributed checkpoint (`torch_dist`) as a layout: global tensors in chunks, for any tp and pp.

A parameter of all layers (and experts) is one tensor under one key, with the layer (and expert) as leading dimensions.
Its chunks are in `.distcp` files, each in the format of torch.save. `.metadata` lists their places. A conversion writes
the same chunks as ranks with these parallel sizes would write, so each rank later reads one file.
"""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.config.parallel import ParallelConfig
from megarl.families.draft_layers import PARAMETERS as DRAFT_LAYERS
from megarl.families.megatron_settings import architecture_settings, router_settings
from megarl.families.model_tensors import list_rules
from megarl.families.parts import Latent
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.families.tensors.rules import Rule, Segment
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides
from megarl.reshard.layouts.megatron import MegatronLayouts
from megarl.types import DataError

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A part of a global tensor in the checkpoint, stored under each of `keys`.

    `pieces` are the Hugging Face elements of the part, except vocabulary padding, in a contiguous storage "slab".
    `offset` and `shape` have the leading dimensions layer and expert. `rank` is the trainer rank that stores it.
    """

    keys: tuple[str, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    pieces: Layout


@dataclass(frozen=True, slots=True)
class Parameter:
    """A Megatron parameter of one layer (and expert).

    `leading` is its index in the leading dimensions `leading_shape`. `layer` and `expert` are its numbers in the
    Hugging Face tensors, -1 for none.
    """

    rule: Rule
    leading: tuple[int, ...]
    leading_shape: tuple[int, ...]
    layer: int = -1
    expert: int = -1
    block_key: str = ""
    """Suffix of the key of one block, if the checkpoint stores each block of a fused parameter under its own key; else
    empty.
    """
    layer_in_key: bool = False
    """Whether the key contains the layer's number, as in Megatron-Core if layers have different parameters."""
    is_latent: bool = False
    """Whether the model has latent attention. Megatron's local layers then rename no norms."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The key with Transformer Engine's layers, and the key with Megatron's local layers if it differs."""
        parameter, variant = self.rule.parameter, self.rule.transformer_engine
        fused_name = parameter if self.rule.is_expert or variant is None else variant.parameter
        # Megatron-Core 0.16.1: except with latent attention, the local spec saves norms under the names of Transformer
        # Engine's fused layers. It does so even with the norm before a router, which is never fused.
        local_name = (
            parameter if self.is_latent else fused_name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        )
        return tuple(dict.fromkeys(map(self._stored_key, (fused_name, local_name))))

    def _stored_key(self, name: str) -> str:
        layer = f"{self.layer}." if self.layer_in_key else ""
        key = name.replace("{layer}.", layer).replace(".local_experts.{expert}.", ".experts.")
        return f"{key}.{self.block_key}" if self.block_key else key

    @property
    def _segments(self) -> Iterator[Segment]:
        """The parameter's parts, in order. A fused parameter, such as query, key and value, has several."""
        return chain.from_iterable(self.rule.blocks)

    def shape(self, padded_vocab: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter, not split over tensor-parallel ranks."""
        shape, dim = list(self.rule.tensors[0][1]), self.rule.dim or 0
        if self.rule.padded:
            shape[dim] = padded_vocab
        else:
            shape[dim] = sum(segment.stop - segment.start for segment in self._segments)
        return tuple(shape)

    def pieces(self, box: Box, storage: str) -> Iterator[Piece]:
        """Yield the Hugging Face elements of `box`, a part of the parameter, as pieces in a contiguous storage."""
        dim = self.rule.dim or 0
        strides = contiguous_strides(box.shape)
        names = {"layer": self.layer, "expert": self.expert}
        segment_start = 0
        for segment in self._segments:
            low = max(box.start[dim], segment_start)
            high = min(box.stop[dim], segment_start + segment.stop - segment.start)
            if low < high:
                # Shift from the parameter's coordinates to the Hugging Face tensor's, along the split dimension.
                shift = segment.start - segment_start
                start = (*box.start[:dim], low + shift, *box.start[dim + 1 :])
                stop = (*box.stop[:dim], high + shift, *box.stop[dim + 1 :])
                tensor_box = Box(segment.tensor.format(**names), start, stop)
                yield Piece(tensor_box, storage, (low - box.start[dim]) * strides[dim], strides)
            segment_start += segment.stop - segment.start


def parameters(model: ModelShape) -> Iterator[Parameter]:
    """Yield all parameters in the order of the model. A tied output layer is stored once, as the embedding."""
    rules = [rule for rule in list_rules(model) if rule.place != "last_of_several_stages"]
    yield from (Parameter(rule, (), ()) for rule in rules if rule.place == "first_stage")
    layer_in_key = any(rule.layers is not None for rule in rules)
    layer_dimension = () if layer_in_key else (model.num_layers,)
    is_latent = isinstance(model.attention, Latent)
    for layer in range(model.num_layers):
        for rule in (rule for rule in rules if rule.place == "every_layer" and rule.has_layer(layer)):
            expert_dimension = (model.num_experts,) if rule.is_expert else ()
            for expert in range(model.num_experts) if rule.is_expert else (-1,):
                leading_indices = (*(() if layer_in_key else (layer,)), *((expert,) if rule.is_expert else ()))
                for part, block_key in _split_into_blocks(rule):
                    yield Parameter(
                        part,
                        leading_indices,
                        (*layer_dimension, *expert_dimension),
                        layer,
                        expert,
                        block_key,
                        layer_in_key,
                        is_latent,
                    )
    for rule in (rule for rule in rules if rule.place == "last_stage"):
        if not rule.parameter.startswith(DRAFT_LAYERS):
            yield Parameter(rule, (), ())
            continue
        # Megatron-Core 0.16.1 writes the number of a draft layer into its keys.
        [layer_number] = rule.layers or (-1,)
        for expert in range(model.num_experts) if rule.is_expert else (-1,):
            leading_indices, leading_shape = ((expert,), (model.num_experts,)) if rule.is_expert else ((), ())
            yield Parameter(rule, leading_indices, leading_shape, layer_number, expert, is_latent=is_latent)


def _split_into_blocks(rule: Rule) -> Iterator[tuple[Rule, str]]:
    """Yield a rule with an empty key ending, or each of its blocks as a separate rule with its key ending."""
    if not rule.block_keys:
        yield rule, ""
    for block, key in zip(rule.blocks if rule.block_keys else (), rule.block_keys, strict=True):
        yield replace(rule, blocks=(block,)), key


def split(
    model: ModelShape, parallel: ParallelConfig, dtypes: Mapping[str, torch.dtype], chunk_bytes: int
) -> Iterator[StoredShard]:
    """Yield the parts of tensors that each rank stores, at most `chunk_bytes` each unless a single row is larger.

    `dtypes` are by Hugging Face tensor. Raises ConfigError if a parallel size does not divide the model. Raises
    DataError if tensors fused into one parameter have different dtypes.
    """
    padded_vocab = padded_vocab_size(model.vocab_size, parallel.tp)
    layouts = MegatronLayouts(model, parallel, padded_vocab)
    dtype_of_keys: dict[tuple[str, ...], torch.dtype] = {}
    for parameter in parameters(model):
        rule, shape = parameter.rule, parameter.shape(padded_vocab)
        for piece in parameter.pieces(Box("", (0,) * len(shape), shape), ""):
            name = piece.box.name
            dtype = dtype_of_keys.setdefault(parameter.keys, dtypes[name])
            if dtypes[name] != dtype:
                raise DataError(
                    f"{name} has dtype {dtypes[name]}, but other parts of the Megatron tensor {parameter.keys[0]} "
                    f"have {dtype}; give all the same dtype with --dtype."
                )
        dtype = dtype_of_keys[parameter.keys]
        chunk = layouts.chunk(parameter.layer) if rule.place == "every_layer" else layouts.chunks_of(rule)[0]
        # Expert parallelism gives each rank an equal, contiguous range of experts.
        ep_rank = parameter.expert * parallel.ep // model.num_experts if rule.is_expert else 0
        for tp_rank, box in _split_into_boxes(rule, shape, layouts, chunk_bytes // dtype.itemsize):
            ones = (1,) * len(parameter.leading)
            yield StoredShard(
                parameter.keys,
                (*parameter.leading_shape, *shape),
                (*parameter.leading, *box.start),
                (*ones, *box.shape),
                dtype,
                layouts.ranks[rule.is_expert, chunk.stage, ep_rank, tp_rank][0],
                tuple(parameter.pieces(box, "slab")),
            )


def _split_into_boxes(
    rule: Rule, shape: tuple[int, ...], layouts: MegatronLayouts, max_elements: int
) -> Iterator[tuple[int, Box]]:
    """Yield (tensor-parallel rank, part) for equal parts of each fused block.

    A part has at most `max_elements` elements.
    """
    dim, block_start = rule.dim or 0, 0
    for length in layouts.part_lengths(rule):
        for rank in range(layouts.count_splits(rule)):
            start, stop = [0] * len(shape), list(shape)
            start[dim], stop[dim] = block_start, block_start + length
            rows = max(1, max_elements // prod(stop[i] - start[i] for i in range(1, len(shape))))
            for first_row in range(start[0], stop[0], rows):
                yield rank, Box("", (first_row, *start[1:]), (min(first_row + rows, stop[0]), *stop[1:]))
            block_start += length


def list_extra_state_keys(model: ModelShape) -> Iterator[str]:
    """Yield the keys of the extra states that Megatron-Core's linear layers require. Each is stored as `[None]`.

    Layer 3 of 32 gives `decoder.layers.self_attention.linear_qkv._extra_state/shard_3_32`.
    """
    for parameter in parameters(model):
        # The blocks of a fused parameter have separate keys, but their layer has one extra state.
        key = parameter.keys[0].removesuffix(f".{parameter.block_key}")
        module, _, weight_name = key.rpartition(".")
        # Linear layers of Megatron-Core 0.16.1 save an extra state with each weight (Transformer Engine: the FP8 state)
        # and look for it when loading.
        if weight_name == "weight" and re.search(r"\.linear_\w+$|\.(in|out)_proj$", module):
            # Without a leading dimension, Megatron-Core counts one object.
            indices_and_shape = (parameter.leading, parameter.leading_shape) if parameter.leading else ((0,), (1,))
            index_text, shape_text = (".".join(map(str, numbers)) for numbers in indices_and_shape)
            yield f"{module}._extra_state/shard_{index_text}_{shape_text}"


@dataclass(frozen=True, slots=True)
class Stored:
    """Place of an item in a checkpoint: bytes `start` to `start + length` of a file."""

    file: str
    start: int
    length: int


def metadata_bytes(chunks: Sequence[tuple[StoredShard, Stored]], objects: Mapping[str, Stored]) -> bytes:
    """Return the contents of the checkpoint's file `.metadata`: the place of each tensor part and object."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for chunk, stored in chunks:
        for key in chunk.keys:
            tensor = tensors.setdefault(
                key, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.global_shape), [])
            )
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
            storage[MetadataIndex(key, chunk.offset)] = _StorageInfo(stored.file, stored.start, stored.length)
    for key, stored in objects.items():
        tensors[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(stored.file, stored.start, stored.length)
    # A fixed protocol: the default depends on the Python version.
    return pickle.dumps(Metadata(tensors, None, storage, StorageMeta(), CURRENT_DCP_VERSION), protocol=4)


def common_state(model: ModelShape, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the contents of `common.pt`. Megatron-LM reads it with `--load` and `--use-checkpoint-args`."""
    family_settings = dict(FAMILIES[model.family].settings(model))
    # Megatron-LM names an activation by a flag.
    activation = family_settings.pop("activation_func", None)
    arguments = Namespace(
        quick_geglu=activation == "quick_gelu",
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        world_size=parallel.world_size,
        data_parallel_size=parallel.dp,
        # The checkpoint has only weights: Megatron-LM must not look for an optimizer or random states.
        no_save_optim=True,
        no_save_rng=True,
        group_query_attention=True,
        max_position_embeddings=model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rotary.theta),
        norm_epsilon=model.norm_epsilon,
        swiglu=activation is None,
        untie_embeddings_and_output_weights=not model.tie_word_embeddings,
        padded_vocab_size=padded_vocab_size(model.vocab_size, parallel.tp),
        rotary_percent=model.rotary.fraction,
        apply_layernorm_1p=model.has_zero_centered_norms,
        **architecture_settings(model) | _megatron_lm_arguments(model) | family_settings,
    )
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}


def _megatron_lm_arguments(model: ModelShape) -> dict[str, Any]:
    """Return Megatron-LM's arguments with other names or values than TransformerConfig's fields."""
    arguments: dict[str, Any] = {"num_experts": model.router.num_experts if model.router else None}
    # Without experts the file has Megatron-LM's default.
    arguments |= {"moe_layer_freq": 1} if model.router is None else router_settings(model.router, model)
    if isinstance(model.attention, Latent):
        # In memory YaRN with factor 1 means unscaled angles. Megatron-LM has a type for these.
        arguments["rope_type"] = "yarn" if model.rotary.scaling == "yarn" else "rope"
    if model.linear_attention is not None:
        arguments["experimental_attention_variant"] = model.linear_attention.megatron_lm_variant
    return arguments
