"""The formula of each use of memory in words, and the source of its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.planner.memory.memory_table import MemoryTable


class Term(NamedTuple):
    formula: str
    source: str


_COUNTED = "counted on real ranks of a CPU: tools/check.py planner, within 2 %"
_OWN = "megarl's own code"
TERMS = {
    "parameters": Term(
        "the rank's weights, in buckets padded to 128 and to the shards, times bytes of a number",
        _COUNTED,
    ),
    "gradients": Term(
        "as many numbers as parameters, float32",
        _COUNTED,
    ),
    "main weights": Term(
        "float32 copies of bfloat16 weights, split over data-parallel ranks",
        _COUNTED,
    ),
    "moments": Term(
        "two float32 numbers for each weight of Adam, one for each of Muon, split over data-parallel ranks",
        _COUNTED,
    ),
    "offloaded copies": Term(
        "weights, main weights and moments in trainer.offload: one block of their size, page-locked on GPUs",
        _COUNTED,
    ),
    "optimizer on the host": Term(
        "12 bytes for each offloaded weight, its gradient, and page-locked copies",
        "Megatron-Core 0.16.1, optimizer/cpu_offloading",
    ),
    "optimizer being built": Term(
        "float32 main weights of whole parameters, while the optimizer is built",
        "Megatron-Core 0.16.1, optimizer/cpu_offloading",
    ),
    "whole matrices": Term(
        "Muon's update of the largest matrix: it in float32, and staging, or operands in optimizer.muon.products",
        _OWN,
    ),
    "drafts": Term(
        "a trained drafter's pass: states of the whole row, its layer once a step, scores of 128 queries, head rows; "
        "with trainer.pp above 1 also states from earlier stages, and a copy of the embedding",
        _OWN,
    ),
    "critic": Term(
        "its parameters, gradients, main weights and moments",
        _COUNTED,
    ),
    "merged adapters": Term(
        "the linear layers with LoRA adapters, once more",
        _COUNTED,
    ),
    "weights in FP8": Term(
        "each linear layer by rows and by columns, one byte a number, and its scales",
        "Transformer Engine 2.11.0, inferred",
    ),
    "weights being sent": Term(
        "a copy of the rank's weights (weights.overlap)",
        _OWN,
    ),
    "engine weights": Term(
        "the engine's weights on the rank, scales of FP8 weights, rotary tables, LoRA slots",
        _COUNTED,
    ),
    "unquantised weights": Term(
        "weights that have partly arrived, and the largest module while it is quantised",
        "megarl's own code; vLLM 0.30",
    ),
    "sleeping engine": Term(
        "engine weights in host memory, if the engine has a LoRA adapter or an EAGLE-3 drafter",
        _OWN,
    ),
    "KV cache": Term(
        "whole blocks within rollout.kv_cache_gib, or what rollout.gpu_memory_utilization leaves",
        _COUNTED,
    ),
    "engine step": Term(
        "activations of one layer for the largest step, or three copies of the sampler's logits",
        "operations of vLLM 0.30; not measured alone",
    ),
    "staging": Term(
        "two buckets of weights.bucket_mib, or all weights if they are smaller",
        _COUNTED,
    ),
    "activations": Term(
        "tensors saved for the backward pass, layer by layer, times rows in flight",
        _COUNTED,
    ),
    "pipeline": Term(
        "hidden states received from the stage before, times rows in flight",
        "Megatron-LM, arXiv 2104.04473",
    ),
    "backward": Term(
        "temporary gradients of the widest feed-forward layer",
        "the operations; not measured alone",
    ),
    "logits": Term(
        "trainer.logprob_chunk_tokens times vocabulary, and two float32 copies without kernels; in an update with "
        "trainer.keep_logits all tokens of a row",
        "models/logprobs.py",
    ),
    "checkpoint": Term(
        "weights and optimizer written by the rank, in page-locked blocks of 1 GiB",
        "training/host/offload.py",
    ),
    "copies of the state": Term(
        "weights and optimizer of the rank, and of its partner on another node, after two steps (checkpoint.replicate)",
        _OWN,
    ),
    "CUDA": Term(
        "a constant: context, kernels, workspaces of cuBLAS, cuDNN and vLLM",
        "fitted to one run on an H200, tools/bench/results/h200.jsonl",
    ),
    "NCCL": Term(
        "communicators: 544 MiB for two ranks, 688 for more; 384 MiB a peer that is sent to on the node, "
        "24 if the group spans nodes; 512 for other nodes",
        "NVIDIA/nccl issues 964, 1189, 1450, 1685, 2363",
    ),
    "CUDA graphs": Term(
        "captured sizes (piecewise, and full up to the requests) times layers times 0.4 MiB",
        "vLLM pull request 11349, issue 50722; sizes of vLLM 0.30",
    ),
    "fragmentation": Term(
        "2.6 % of activations, pipeline, backward, logits and engine step; at least so much on ranks that only sample",
        "tools/check.py allocator, a simulation",
    ),
    "DeepEP": Term(
        "its buffers by ranks, tokens of a channel and hidden size; between nodes NVSHMEM's heap",
        "DeepEP 1.2.1, csrc/config.hpp; inferred between nodes",
    ),
    "libraries": Term(
        "a constant of host memory for each rank",
        "measured on a CPU",
    ),
}
"""Terms by the kinds of `memory_table.MemoryUse`. Scoring models have their own names: see `term_of`."""
_FROZEN = Term("weights of a model that only scores; on GPUs they wait in host memory", _COUNTED)


def term_of(kind: str) -> Term:
    """Return the term of a use. An unknown kind is the name of a frozen model."""
    return TERMS.get(kind, _FROZEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTerm:
    """A term with its largest bytes over all phases, on a GPU and on the host."""

    kind: str
    device_bytes: int
    host_bytes: int
    formula: str
    source: str


def explain_terms(table: MemoryTable) -> list[ExplainedTerm]:
    """Return the formula (term) of each use of memory in a table, with the largest bytes of that use."""
    terms = []
    for kind in table.kinds:
        uses = [phase.use(kind) for phase in table.phases]
        term = term_of(kind)
        terms.append(
            ExplainedTerm(
                kind=kind,
                device_bytes=max(use.device_bytes for use in uses),
                host_bytes=max(use.host_bytes for use in uses),
                formula=term.formula,
                source=term.source,
            )
        )
    return terms
