"""Comparison of an engine's live parameters with the model folder: a few random rows of each kind of tensor, by name.

Checksums of trainer and engine agree even if a layout is one row off, because both use megarl's layouts. Here vLLM's
own loader decides the place of a tensor. It runs on memory-mapped tensors of the folder. Its writes are compared
instead of executed, so only the compared rows are read. The engine must have the folder's weights: this runs once,
before the first update.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megarl.families.tensors.names import parse_name
from megarl.reshard.layouts.vllm import Recorder
from megarl.reshard.layouts.vllm_quantised import QuantisedModule, all_loadable, quantised_modules
from megarl.reshard.staging import gather_values
from megarl.types import MegarlError

PER_KIND = 2
"""Compared tensors of each kind: two layers, or two experts."""
ROWS = 4
"""Compared rows in each copy that the loader makes."""
COLUMNS = 4096
"""Maximum compared elements of a row. A rank reads at most 64 KiB for each copy of the loader."""


def sample_names(names: Iterable[str], seed: int) -> list[str]:
    """Return at most PER_KIND random names of each kind. Names of a kind differ only in layer and expert number."""
    names_by_kind: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        names_by_kind[parse_name(name).template].append(name)
    random_state = random.Random(seed)
    return [
        name
        for kind_names in names_by_kind.values()
        for name in random_state.sample(kind_names, min(PER_KIND, len(kind_names)))
    ]


def check_rows(
    model: nn.Module | None,
    names: Sequence[str],
    tensor_of: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    seed: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare rows of the folder's tensors `names` with this rank's engine.

    A collective over `group`. `tensor_of` returns a memory-mapped tensor [*shape] of the folder by name. `dtype` is the
    type of the trained weights. A rank without an engine has `model` None. Raises MegarlError on all ranks, naming the
    first tensor that differs or was not copied.
    """
    fault = None if model is None else _find_fault(model, names, tensor_of, dtype, seed)
    for rank, text in enumerate(gather_values(fault, group)):
        if text is not None:
            raise MegarlError(f"rank {rank}: {text}. Please report this with the recipe.")


@torch.no_grad()
def _find_fault(
    model: nn.Module, names: Sequence[str], tensor_of: Callable[[str], Tensor], dtype: torch.dtype, seed: int
) -> str | None:
    """Load the folder's tensors again with vLLM's loader, but compare rows instead of writing.

    Return the first fault.
    """
    quantised = quantised_modules(model)
    with all_loadable(quantised):
        comparer = RowComparer(model.named_parameters(), quantised, dtype, seed)
        with comparer:
            # Every vLLM model has this method, but torch's modules do not declare it.
            model.load_weights(comparer.folder_tensors(names, tensor_of))  # pyright: ignore[reportCallIssue]
    if comparer.faults:
        return comparer.faults[0]
    unplaced = [name for name in names if name not in comparer.copied_names]
    return f"vLLM's loader places no row of {unplaced[0]} in the engine" if unplaced else None


class RowComparer(Recorder):
    """Torch dispatch mode that compares the loader's writes with live values instead of executing the writes.

    `parameters` are pairs (name, live tensor [*shape]). Parameters of `quantised` modules are on the meta device.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        quantised: Sequence[QuantisedModule],
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__(parameters)
        self.faults: list[str] = []
        self.copied_names: set[str] = set()
        """Names of tensors that the loader copied into live parameters."""
        self._modules = {name: module for module in quantised for name in module.shapes}
        self._dtype, self._random = dtype, random.Random(seed)
        self._names: dict[int, str] = {}
        """Address of a parameter's storage -> name of the folder's tensor from which the loader probably filled it."""
        self._mapped: list[Tensor] = []

    def folder_tensors(self, names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and memory-mapped tensors [*shape] of the folder."""
        for name in names:
            tensor = tensor_of(name)
            self._names[_storage(tensor)] = name
            # Without this reference, another tensor could get the same storage address.
            self._mapped.append(tensor)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and name its result after the folder's tensor from which it was computed."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor) and _storage(result) not in self._live:
            operands = (_storage(operand) for operand in tree_leaves((args, kwargs)) if isinstance(operand, Tensor))
            if (name := next((self._names[key] for key in operands if key in self._names), None)) is not None:
                self._names[_storage(result)] = name
        return result

    def _handle_write(
        self, func: Any, named_parameter: tuple[str, Tensor], target: Tensor, arguments: Mapping[str, Any]
    ) -> None:
        """Compare some rows with the live parameter. vLLM's loader calls this in place of a write; nothing is written.

        The first differing row is added to the faults.
        """
        # vLLM's loader copies real values only by `copy_`; other writes fill padding.
        if func.overloadpacket.__name__ != "copy_" or not target.numel():
            return
        parameter_name, parameter = named_parameter
        name = self._names.get(_storage(arguments["src"]), "an unknown tensor")
        self.copied_names.add(name)
        source = arguments["src"].expand(target.shape)
        for row_index in self._draw_rows(target.shape):
            live_row, folder_row = target[row_index], source[row_index].cpu()
            if (module := self._modules.get(parameter_name)) is not None:
                first_element = int(live_row.storage_offset() - parameter.storage_offset())
                # `holds` returns None if the kernel stores the weights in another order: accept them.
                is_equal = module.holds(parameter_name, first_element, live_row.stride(-1), folder_row) is not False
            else:
                is_equal = self._is_equal(live_row.cpu(), folder_row)
            if not is_equal:
                self.faults.append(
                    f"the engine's parameter {parameter_name} does not hold row {_format_index(row_index)} of its part "
                    f"of {name} as in the model folder"
                )
                return

    def _is_equal(self, live_row: Tensor, folder_row: Tensor) -> bool:
        """Return whether two rows [columns] are equal before or after rounding to the trainer's dtype."""
        wide_row = folder_row.to(torch.float32)
        return torch.equal(live_row, wide_row.to(live_row.dtype)) or torch.equal(
            live_row, wide_row.to(self._dtype).to(live_row.dtype)
        )

    def _draw_rows(self, shape: Sequence[int]) -> Iterator[tuple[int | slice, ...]]:
        """Yield the indices of at most ROWS random rows of a tensor of this `shape`, each at most COLUMNS long."""
        size = shape[-1] if shape else 1
        for _ in range(ROWS if len(shape) > 1 else 1):
            start = self._random.randrange(max(1, size - COLUMNS + 1))
            leading = tuple(self._random.randrange(count) for count in shape[:-1])
            yield (*leading, slice(start, start + COLUMNS)) if shape else ()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _format_index(row: Sequence[int | slice]) -> str:
    return ", ".join(f"{part.start}:" if isinstance(part, slice) else str(part) for part in row)
