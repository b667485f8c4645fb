"""vLLM modules with FP8 weights: their unquantised parameters during loading, and their quantisation by vLLM.

vLLM's online quantisation loads unquantised weights, then computes FP8 weights and scales. Both steps are vLLM's own
code here. vLLM stores the loading parameters for its own reload. Its quantiser runs on a copy of the module, so no live
tensor is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from megarl.rounding import divide_up
from megarl.types import MegarlError

METHODS = (
    "Fp8PerBlockOnlineLinearMethod",
    "Fp8PerBlockOnlineMoEMethod",
    "Fp8PtpcOnlineLinearMethod",
    "Fp8PtpcOnlineMoEMethod",
)
"""Quantisation methods of vLLM 0.30 with equal results for equal weights: blocks of 128 x 128, and rows."""

LINEAR_KERNELS = (
    "TritonFp8BlockScaledMMKernel",
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
    "CPUFp8BlockScaledMMKernel",
    "CutlassFP8ScaledMMLinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel",
)
"""Kernels that store weights and scales unchanged, or in an order that depends only on weights and scales."""

EXPERT_BACKENDS = (
    "TRITON",
    "BATCHED_TRITON",
    "DEEPGEMM",
    "BATCHED_DEEPGEMM",
    "CPU",
)
"""Backends of MoE layers with the property of `LINEAR_KERNELS`.

All other backends also store workspaces, sort orders or factors. CUTLASS stores strides on the device, outside
parameters and buffers; a deep sleep would lose them.
"""

_BLOCK = 128
"""Rows and columns of a block with one scale."""
_RELATIVE_ROUNDING = 0.07
"""Largest relative error of a number in e4m3, with a mantissa of 3 bits: 1/16. Scales are rounded too."""
_LEAST_NUMBER = 2.0**-9
"""Smallest positive number of e4m3. Times a scale, it bounds the absolute rounding error near 0."""


class UnknownKernelError(MegarlError):
    """Raised for a module whose kernel stores FP8 weights in an order unknown to megarl."""


class QuantisedModule:
    """A module of a live vLLM model with FP8 weights. `name` is its path in the model.

    Raises UnknownKernelError naming module and kernel.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self._module = name, module
        self._check_kernel()
        self._loaded = _parameters_before_loading(module)
        self._live = {
            key: p for key, p in module._parameters.items() if p is not None and key not in _unquantised_names(module)
        }

    @property
    def live(self) -> dict[str, Tensor]:
        """The live weights [*shape] and scales [*blocks], by their names in the model."""
        return {f"{self.name}.{key}": parameter for key, parameter in self._live.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the module's weights before quantisation, by their names in the model."""
        return {f"{self.name}.{key}": tuple(parameter.shape) for key, parameter in self._loaded.items()}

    def padding(self) -> dict[str, int]:
        """Return the elements of each weight outside the checkpoint.

        Only experts have such padding: their sizes are rounded up to whole blocks.
        """
        config = getattr(self._module, "moe_config", None)
        if config is None:
            return {}
        hidden_size, intermediate_size = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
        num_padded = {}
        for key, parameter in self._loaded.items():
            num_projections = self._method.moe.w13_num_shards if key == "w13_weight" else 1
            num_padded[f"{self.name}.{key}"] = (
                parameter.numel() - parameter.shape[0] * num_projections * hidden_size * intermediate_size
            )
        return num_padded

    @contextmanager
    def loadable(self) -> Iterator[None]:
        """Context in which the module's parameters are unquantised meta tensors, as during vLLM's loading."""
        live = self._module._parameters
        plain_parameters = {key: live[key] for key in _unquantised_names(self._module) if key in live}
        # `vars` bypasses `nn.Module.__setattr__`: the whole dictionary is exchanged without registering parameters
        # again.
        vars(self._module)["_parameters"] = {**self._loaded, **plain_parameters}
        try:
            yield
        finally:
            vars(self._module)["_parameters"] = live

    def quantise(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Quantise weights [*shape] with vLLM. A collective over the engine.

        `weights` have the names and shapes of `shapes`; their padding may have any values. Returns FP8 weights and
        scales, by the names of `live_tensor`. Raises MegarlError if a result's layout differs from the live tensor's.
        """
        # vLLM sets attributes on the copy, not on the live module: CUDA graphs and kernels still use the live tensors.
        # vLLM 0.30 quantises a module only once and sets a flag, so the copy drops the flag.
        module, method = copy.copy(self._module), copy.copy(self._method)
        vars(module).pop("_already_called_process_weights_after_loading", None)
        vars(module)["_parameters"] = {
            key: _as_parameter(weights[f"{self.name}.{key}"], loaded_tensor)
            for key, loaded_tensor in self._loaded.items()
        }
        # The kernel object of a linear layer changes with the weights, so it is copied as well. Expert methods would
        # create a new kernel instead: `_make_format_step` replaces this step.
        if hasattr(method, "fp8_linear"):
            method.fp8_linear = copy.copy(method.fp8_linear)
        else:
            method._setup_kernel = _make_format_step(method)
        method.process_weights_after_loading(module)
        results = {
            f"{self.name}.{key}": parameter.data
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        for name, live_tensor in self.live.items():
            result = results.get(name)
            if result is None or _shape_dtype_strides(result) != _shape_dtype_strides(live_tensor):
                raise MegarlError(
                    f"{name}: vLLM's quantiser returned "
                    f"{result if result is None else _shape_dtype_strides(result)} for new weights; "
                    f"the engine has {_shape_dtype_strides(live_tensor)}. Please report this with the recipe."
                )
        return {name: results[name] for name in self.live}

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Quantise weights [*shape] into the live tensors."""
        for name, result in self.quantise(weights).items():
            _bits(self.live[name]).copy_(_bits(result))

    def differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        results = self.quantise(weights)
        return [name for name, live in self.live.items() if not torch.equal(_bits(live), _bits(results[name]))]

    def holds(self, name: str, first_element: int, stride: int, row: Tensor) -> bool | None:
        """Return whether the live weight `name` equals a row [columns] of unquantised values, within FP8's rounding.

        In the flat unquantised weight, the row starts at element `first_element`, and `stride` is the distance between
        its elements. None: the kernel reorders weights or scales, so rows cannot be compared.
        """
        key = name.removeprefix(f"{self.name}.")
        live, loaded = self._live.get(key), self._loaded[key]
        scales = [scale for scale_key, scale in self._live.items() if scale_key.startswith(f"{key}_scale")]
        if live is None or len(scales) != 1 or scales[0].dim() != live.dim():
            return None
        [scale] = scales
        # Some kernels store the transposed weight.
        live = live.t() if live.dim() == 2 and live.t().is_contiguous() and not live.is_contiguous() else live
        if live.shape != loaded.shape:
            return None
        sizes = list(zip(live.shape, scale.shape, strict=True))
        # Elements per scale, by dimension.
        scale_blocks = [1 if count == size else size if count == 1 else _BLOCK for size, count in sizes]
        if any(divide_up(size, by=block) != count for block, (size, count) in zip(scale_blocks, sizes, strict=True)):
            return None
        element_indices = first_element + stride * torch.arange(len(row))
        coordinates = torch.unravel_index(element_indices.to(live.device), live.shape)
        scale_factors = scale[
            tuple(dim_indices // block for dim_indices, block in zip(coordinates, scale_blocks, strict=True))
        ].float()
        live_values = _bits(live)[coordinates].view(live.dtype).float() * scale_factors
        expected_values = row.to(live.device).float()
        return bool(
            (
                (live_values - expected_values).abs()
                <= expected_values.abs() * _RELATIVE_ROUNDING + scale_factors * _LEAST_NUMBER
            ).all()
        )

    @property
    def _method(self) -> Any:
        return self._module.quant_method

    def _check_kernel(self) -> None:
        """Raise UnknownKernelError unless the kernel stores weights in the plain layout."""
        if (backend := getattr(self._method, "fp8_backend", None)) is not None:
            if backend.name not in EXPERT_BACKENDS:
                raise UnknownKernelError(
                    f"{self.name}: the {backend.name} expert backend keeps FP8 weights in a form of its own; set "
                    "rollout.vllm.moe_backend to triton or deep_gemm"
                )
            return
        kernel = type(getattr(self._method, "fp8_linear", None)).__name__
        if kernel not in LINEAR_KERNELS:
            raise UnknownKernelError(
                f"{self.name}: {kernel} keeps FP8 weights in a form of its own; set rollout.vllm.linear_backend to "
                "triton, cutlass or deep_gemm"
            )


def is_quantised(module: nn.Module) -> bool:
    return type(getattr(module, "quant_method", None)).__name__ in METHODS


def quantised_modules(model: nn.Module | None) -> list[QuantisedModule]:
    """Return the quantised modules of a model in order. Raises UnknownKernelError for an unknown kernel."""
    named = model.named_modules() if model is not None else ()
    return [QuantisedModule(name, module) for name, module in named if is_quantised(module)]


@contextmanager
def all_loadable(modules: Sequence[QuantisedModule]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.loadable())
        yield


def _parameters_before_loading(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that vLLM made for loading, on the meta device, with their own loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    # vLLM 0.30 stores these parameters for its layerwise reload. Its wrapped loaders would start this reload, so the
    # original loaders are restored.
    stored_parameters, _ = get_layerwise_info(module).restore_metadata
    parameters = {}
    for key, parameter in stored_parameters.items():
        if key not in _unquantised_names(module):
            parameters[key] = restore_layer_refs(to_meta_tensor(parameter), module)
            parameters[key].weight_loader = cast(Any, _get_original_loader(parameters[key]))
    return parameters


def _unquantised_names(module: nn.Module) -> set[str]:
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return {key for key in module._parameters if key in SKIP_TENSORS}


def _as_parameter(weights: Tensor, template: Tensor) -> Tensor:
    """Return weights [*shape] as a parameter of the class and attributes of `template`, which vLLM's loader set."""
    parameter = weights.detach()
    parameter.__class__ = template.__class__
    vars(parameter).update(vars(template))
    return parameter


def _make_format_step(method: Any) -> Any:
    """Return the step of an MoE method after quantising: it reorders weights without creating a new kernel."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import convert_to_fp8_moe_kernel_format
    from vllm.model_executor.utils import replace_parameter

    scale = method.weight_scale_name
    names = ("w13_weight", "w2_weight", f"w13_{scale}", f"w2_{scale}")

    def reorder_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        """Convert the layer's weights and scales to the kernel's format, with the arguments of vLLM's own step."""
        arguments = dict(
            zip(("w13", "w2", "w13_scale", "w2_scale", "w13_input_scale", "w2_input_scale"), args, strict=False)
        )
        tensors = convert_to_fp8_moe_kernel_format(
            fp8_backend=method.fp8_backend, layer=layer, **{**arguments, **kwargs}
        )
        for name, tensor in zip(names, tensors, strict=True):
            replace_parameter(layer, name, tensor)

    return reorder_weights


def _shape_dtype_strides(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tuple(tensor.stride())


def _bits(tensor: Tensor) -> Tensor:
    """Return a uint8 view [*shape] of a one-byte parameter: torch 2.13 cannot compare FP8."""
    return tensor.data.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.data
