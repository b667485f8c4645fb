"""Layout of vLLM's live parameters, recorded from vLLM's own loader.

`load_weights` runs once on meta tensors, and every copy into a live parameter is recorded as a piece. Fused
projections, replicated KV heads, padding and experts thus need no rules here. If a loader clones a checkpoint tensor
before writing it, the recorder follows the clone. A loader that computes values raises an error naming the parameter.
The layout of a quantising module describes its unquantised weights (`layouts.vllm_quantised`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides
from megarl.reshard.layouts.vllm_quantised import UnknownKernelError, all_loadable, is_quantised, quantised_modules
from megarl.types import MegarlError

# Classes of vLLM 0.30 whose live parameters stay plain slices of checkpoint tensors after loading.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
# Other expert backends of vLLM 0.30 reorder expert weights after loading.
PLAIN_MOE_BACKENDS = ("TRITON", "BATCHED_TRITON", "CPU")


class DirectWriteError(MegarlError):
    """Raised if an engine's live parameters are not plain slices of the checkpoint's tensors."""


def record_layout(model: nn.Module, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Layout:
    """Record the layout of a live vLLM model. `tensors` maps checkpoint names to shapes and dtypes.

    A piece's storage is the parameter's name in `named_parameters()`. Live values do not change. Raises
    DirectWriteError naming the parameter if the loader writes some element never or twice.
    """
    check_direct_write(model)
    try:
        quantised = quantised_modules(model)
    except UnknownKernelError as error:
        raise DirectWriteError(str(error)) from error
    with all_loadable(quantised):
        recorder = Recorder(model.named_parameters())
        with recorder:
            # Every vLLM model has this method, but torch's modules do not declare it.
            model.load_weights(recorder.sources(tensors))  # pyright: ignore[reportCallIssue]
        recorder.check_coverage(
            {name: num_padding for module in quantised for name, num_padding in module.padding().items()}
        )
    return tuple(recorder.pieces)


def check_direct_write(model: nn.Module) -> None:
    """Raise DirectWriteError if a layer of the model converts its weights after loading."""
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if is_quantised(module):
            continue
        if hasattr(module, "quant_method") and module.quant_method is not None and method not in PLAIN_METHODS:
            raise DirectWriteError(f"{name}: {method} stores converted weights; they cannot be written in place")
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in PLAIN_MOE_BACKENDS:
            raise DirectWriteError(
                f"{name}: the {backend.name} expert backend reorders weights; set rollout.vllm.moe_backend to triton"
            )
        if hasattr(module, "lora_a_stacked"):
            raise DirectWriteError(
                f"{name}: LoRA adapters inside vLLM cannot be combined with weights written in place"
            )


def zero_padding(model: nn.Module) -> None:
    """Zero the elements that vLLM's loader zeroes and no checkpoint tensor has.

    A reshard does not write them. They are padding rows of the vocabulary, and the experts' output bias on all ranks
    except the first, because ranks are summed.
    """
    # Imported only where an engine exists: ranks that only train must not load vLLM.
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            rows = module.weight.data
            assert isinstance(rows, torch.Tensor)
            rows[module.shard_indices.num_org_elements :].zero_()
        experts: Any = module
        bias = getattr(experts, "w2_bias", None)
        if isinstance(bias, torch.Tensor) and experts.moe_config.moe_parallel_config.tp_rank > 0:
            bias.data.zero_()


class Recorder(TorchDispatchMode):
    """Torch dispatch mode that records copies from checkpoint tensors into live parameters without executing them.

    `parameters` are pairs (name, live tensor [*shape]).
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self._padding: dict[str, int] = defaultdict(int)
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        # Copies of views of sources, by the copy's storage: (copy, view).
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._zeroed: set[str] = set()
        self._live: dict[int, tuple[str, torch.Tensor]] = {}
        # Some parameters are views of another parameter's storage. The largest parameter comes last and replaces them.
        for name, parameter in sorted(parameters, key=lambda item: item[1].numel()):
            self._live[_storage(parameter)] = (name, parameter)

    def sources(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and meta tensors [*shape] of checkpoint tensors. `tensors` maps names to shape and dtype."""
        for name, (shape, dtype) in tensors.items():
            source = torch.empty(shape, dtype=dtype, device="meta")
            self._sources[_storage(source)] = (name, source)
            yield name, source

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record a write into a live parameter instead of running it. Run all other operations."""
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            target = arguments.get(argument.name)
            # In an operation's schema, torch marks the written arguments: this shows every in-place write.
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(target, torch.Tensor):
                continue
            if named_parameter := self._live.get(_storage(target)):
                self._handle_write(func, named_parameter, target, arguments)
                return target
            if named_source := self._sources.get(_storage(target)):
                self._record_zeroed_source(func, named_source, target)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.clone.default and _storage(args[0]) in self._sources:
            self._copies[_storage(result)] = (result, args[0])
        return result

    def _handle_write(
        self, func, named_parameter: tuple[str, torch.Tensor], target: torch.Tensor, arguments: dict
    ) -> None:
        """Record a write of vLLM's loader: padding, or a piece copied from a checkpoint tensor.

        Raises DirectWriteError for any other operation.
        """
        name, parameter = named_parameter
        operation = func.overloadpacket.__name__
        # vLLM's loaders fill and zero only padding. Real values always arrive through `copy_`.
        if operation in ("fill_", "zero_"):
            self._padding[name] += target.numel()
        elif operation != "copy_":
            raise DirectWriteError(
                f"{name}: vLLM's loader applies {operation} to this parameter instead of copying a checkpoint tensor "
                "into it"
            )
        elif target.numel():
            piece = self._trace_copy(name, parameter, target, arguments["src"])
            # The loader may zero a part of the checkpoint's tensor first, and then copy it.
            if piece.box.name in self._zeroed:
                self._padding[name] += target.numel()
            else:
                self.pieces.append(piece)

    def _record_zeroed_source(self, func, source: tuple[str, torch.Tensor], target: torch.Tensor) -> None:
        name, tensor = source
        if func.overloadpacket.__name__ != "zero_" or target.numel() != tensor.numel():
            raise DirectWriteError(
                f"{name}: vLLM's loader modifies this checkpoint tensor before copying it into a parameter"
            )
        self._zeroed.add(name)

    def _trace_copy(self, name: str, parameter: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> Piece:
        """Return the piece for a copy, after finding the checkpoint tensor of which `source` is a view."""
        copy, view = self._copies.get(_storage(source), (None, source))
        # Only whole copies are followed. A part of a copy would need the composition of two views.
        if copy is not None and copy.shape == source.shape and copy.stride() == source.stride():
            source = view
        if _storage(source) not in self._sources:
            raise DirectWriteError(
                f"{name}: vLLM's loader fills this parameter with computed values instead of a checkpoint tensor"
            )
        tensor_name, tensor = self._sources[_storage(source)]
        piece = _make_piece(tensor_name, tensor, source, name, parameter, target)
        if piece is None:
            raise DirectWriteError(
                f"{name}: vLLM's loader does not copy a plain slice of {tensor_name}, but {tuple(source.shape)} with "
                f"strides {source.stride()} into {tuple(target.shape)} with strides {target.stride()}"
            )
        return piece

    def check_coverage(self, unfilled: Mapping[str, int]) -> None:
        """Raise DirectWriteError if the written elements of a parameter are more or fewer than its size.

        `unfilled` counts, by parameter, the elements that the loader sets to zero later.
        """
        copied: dict[str, int] = defaultdict(int)
        for piece in self.pieces:
            copied[piece.storage] += piece.box.numel
        for name, parameter in self._live.values():
            padding = self._padding[name] + unfilled.get(name, 0)
            if copied[name] + padding != parameter.numel():
                raise DirectWriteError(
                    f"{name}: {copied[name]} of {parameter.numel()} elements come from the checkpoint and "
                    f"{padding} are padding; each must be written exactly once"
                )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _make_piece(
    tensor_name: str,
    tensor: torch.Tensor,
    source: torch.Tensor,
    parameter_name: str,
    parameter: torch.Tensor,
    target: torch.Tensor,
) -> Piece | None:
    """Return the piece for a copy from `source`, a view of `tensor`, to `target`, a view of `parameter`.

    Both views are [*view], and `tensor` is contiguous. None unless `source` is an axis-parallel slice of `tensor`; its
    dimensions may be permuted, and a dimension with one selected index may be missing.
    """
    if source.shape != target.shape:
        return None
    # A view's stride identifies the tensor's dimension. A dimension of size 1 has no meaningful stride.
    dim_of_stride = {source.stride(dim): dim for dim in range(source.dim()) if source.size(dim) > 1}
    start, stop, dims = [], [], []
    for size, stride in zip(tensor.shape, contiguous_strides(tensor.shape), strict=True):
        dim = dim_of_stride.pop(stride, None) if size > 1 else None
        start.append(int(source.storage_offset()) // stride % size)
        stop.append(start[-1] + (1 if dim is None else source.size(dim)))
        dims.append(dim)
    box = Box(tensor_name, tuple(start), tuple(stop))
    if (
        dim_of_stride
        or box.numel != source.numel()
        or any(end > size_of_dim for end, size_of_dim in zip(stop, tensor.shape, strict=True))
    ):
        return None
    box_strides = contiguous_strides(box.shape)
    strides = tuple(box_strides[dim_index] if dim is None else target.stride(dim) for dim_index, dim in enumerate(dims))
    return Piece(box, parameter_name, int(target.storage_offset() - parameter.storage_offset()), strides)
