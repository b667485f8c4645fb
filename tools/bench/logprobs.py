"""Log-probs and entropies with their gradients compared with whole logits: memory, time and error.

    python tools/bench/logprobs.py --tokens 4096 --vocabulary 151936 --hidden 1024

Each way runs in a process of its own, in turns. Its memory is the most it had resident beyond what it had before the
forward, less the gradients that it hands over; its time is forward and backward after one small run. The error is
against float64 over a share of the tokens: in bfloat16 of the same bfloat16 inputs, where logits rounded to bfloat16
set it for both ways. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import available_bytes, machine, metric_line, print_line, versions
from torch import Tensor

CHECKED_TOKENS = 64


def problem(tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states, head, targets, gradients of log-probs and entropies; logits of unit spread times four."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=g).to(dtype)
    head = torch.randn(vocabulary, hidden, generator=g).mul_(4 * hidden**-0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=g)
    return [states, head, targets, torch.randn(tokens, generator=g), torch.randn(tokens, generator=g)]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def run(way: str, p: list[Tensor], chunk: int, entropy_gradient: bool) -> dict[str, Tensor]:
    from megarl.models.logprobs import vocab_parallel_logprobs

    hidden, weight = (tensor.detach().requires_grad_() for tensor in p[:2])
    if way == "naive":
        logprob, entropy = naive(hidden, weight, p[2])
    else:
        logprob, entropy = vocab_parallel_logprobs(
            hidden, weight, p[2], first_token_id=0, group=None, temperature=1.0, chunk_tokens=chunk
        )
    outputs = [logprob, entropy] if entropy_gradient else [logprob]
    torch.autograd.backward(outputs, [g.to(logprob.dtype) for g in p[3 : 3 + len(outputs)]])
    assert hidden.grad is not None and weight.grad is not None
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM the most since the start or since `5` was written to clear_refs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def worker(options: argparse.Namespace) -> None:
    """One way in this process; prints its measurements."""
    dtype = getattr(torch, options.dtype)
    p = problem(options.tokens, options.vocabulary, options.hidden, dtype)
    small = [p[0][:CHECKED_TOKENS], p[1], *(tensor[:CHECKED_TOKENS] for tensor in p[2:])]
    found: dict[str, Any] = {}
    got = run(options.way, small, options.chunk, True)
    if options.check:
        exact = run("naive", [t.double() if t.is_floating_point() else t for t in small], 0, True)
        for name in exact:
            scale = 1.0 if name in ("logprob", "entropy") else exact[name].abs().max().item()
            found[name] = (got[name].double() - exact[name]).abs().max().item() / scale
        del exact
    del got, small
    if not options.check:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter(), time.process_time()
        out = run(options.way, p, options.chunk, not options.logged)
        found["seconds"] = time.perf_counter() - start[0]
        found["processor_seconds"] = time.process_time() - start[1]
        most = resident("VmHWM")
        gradients = sum(out[name].nbytes for name in ("hidden", "weight"))
        found |= {"extra_bytes": most - before - gradients, "gradient_bytes": gradients}
    print(json.dumps(found))


def measured(options: argparse.Namespace, way: str, dtype: str, *flags: str) -> dict[str, float]:
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "hidden", "chunk")]
    command = [sys.executable, __file__, "--way", way, "--dtype", dtype, *sizes, *flags]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(options: argparse.Namespace, dtype: str) -> None:
    case = f"{options.tokens} tokens x {options.vocabulary}, hidden {options.hidden}, {dtype}, chunk {options.chunk}"
    shared = {"machine": machine(), "versions": versions(), "case": case, "threads": torch.get_num_threads()}
    against = "logits = hidden @ weight.T, log_softmax, gather, entropy"
    errors, theirs = (measured(options, way, dtype, "--check") for way in ("ours", "naive"))
    for name, error in errors.items():
        outcome = name in ("logprob", "entropy")
        unit = "largest difference to float64" + ("" if outcome else ", of the largest gradient")
        target = "<= 0.00001" if outcome and dtype == "float32" else None
        more = {"naive": theirs[name], "against": against, "digits": 9}
        print_line(metric_line(f"logprobs_error_{name}", [error], unit, target=target, **more, **shared))
    for flags in ([], ["--logged"]):
        rounds = [
            {way: measured(options, way, dtype, *flags) for way in ("naive", "ours")} for _ in range(options.rounds)
        ]
        shared |= {"machine": machine(), "entropy": "logged" if flags else "with gradient"}
        for metric, field, target in (
            ("memory", "extra_bytes", "<= 0.05"), ("time", "seconds", "<= 1.1"),
            ("processor_time", "processor_seconds", None),
        ):  # fmt: skip
            ratios = [r["ours"][field] / r["naive"][field] for r in rounds]
            more = {way: statistics.median(r[way][field] for r in rounds) for way in ("naive", "ours")}
            more |= {"gradient_bytes": rounds[0]["ours"]["gradient_bytes"]} if metric == "memory" else {}
            print_line(
                metric_line(f"logprobs_{metric}", ratios, "of naive", target=target, against=against, **more, **shared)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=48, help="as many logits at once as this many tokens have")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    for name in ("--way", "--dtype"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--check", "--logged"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return worker(options)
    needed = 7 * 4 * options.tokens * options.vocabulary
    if available_bytes() < needed:
        raise SystemExit(f"whole logits take about {needed / 1e9:.0f} GB, more than is free; give fewer --tokens")
    for dtype in options.dtypes:
        measure(options, dtype)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    main()
