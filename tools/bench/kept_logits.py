"""Log-probs of an update with logits kept for the backward pass, against logits computed again.

    python tools/bench/kept_logits.py --tokens 256 --vocabulary 8192 --hidden 256 --chunk 64

Both ways run in turns in one process, after one run of each. A line has the median of the pairs' ratios of CPU seconds,
their range, the matrix products of each way, and whether all results have the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from logprobs import problem
from report import machine, metric_line, print_line, versions
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.models.logprobs import vocab_parallel_logprobs


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self.count += left.numel() * right.size(1)
        return function(*args, **(kwargs or {}))


def update(tensors: list[Tensor], chunk: int, *, keeps_logits: bool) -> list[Tensor]:
    """Return log-probs and the gradients of hidden states and head."""
    hidden, weight = (tensor.detach().requires_grad_() for tensor in tensors[:2])
    logprobs, _ = vocab_parallel_logprobs(
        hidden,
        weight,
        tensors[2],
        first_token_id=0,
        group=None,
        temperature=1.0,
        chunk_tokens=chunk,
        keeps_logits=keeps_logits,
    )
    logprobs.backward(tensors[3])
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), hidden.grad, weight.grad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64, help="as many logits at once as this many tokens have")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    for dtype in options.dtypes:
        tensors = problem(options.tokens, options.vocabulary, options.hidden, getattr(torch, dtype))
        products, results = {}, {}
        for keeps in (False, True):
            with Multiplications() as multiplications:
                results[keeps] = update(tensors, options.chunk, keeps_logits=keeps)
            products[keeps] = multiplications.count / (options.tokens * options.vocabulary * options.hidden)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.pairs):
            for keeps in ((False, True), (True, False))[number % 2]:
                start = time.process_time()
                update(tensors, options.chunk, keeps_logits=keeps)
                seconds[keeps].append(time.process_time() - start)
        more = {
            "recomputed": statistics.median(seconds[False]), "kept": statistics.median(seconds[True]),
            "recomputed_products": products[False], "kept_products": products[True],
            "same_bits": all(map(torch.equal, results[False], results[True])),
        }  # fmt: skip
        size = f"{options.tokens} tokens x {options.vocabulary}, hidden {options.hidden}, chunk {options.chunk}"
        ratios = [kept / again for again, kept in zip(seconds[False], seconds[True], strict=True)]
        print_line(
            metric_line(
                "kept_logits_cpu_seconds",
                ratios,
                "of recomputed",
                target="<= 0.85",
                against="logits computed again in the backward pass",
                machine=machine(),
                versions=versions(),
                case=f"{size}, {dtype}",
                threads=torch.get_num_threads(),
                **more,
            )
        )


if __name__ == "__main__":
    main()
