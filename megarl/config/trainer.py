"""Recipe section `trainer`: parallel sizes, memory, precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import COLOCATED, ENGINE, LOGPROBS, RL, one_of
from megarl.config.section import Section

RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class TrainerConfig(Section):
    """Parallel sizes, memory and precision of the Megatron trainer."""

    tp: PositiveInt = 1
    """Tensor-parallel size: attention heads, feed-forward channels and vocabulary are split over n ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel size: the layers are split over n stages."""
    dp: PositiveInt | None = None
    """Data-parallel size; default: ranks / (tp * pp * cp)."""
    vpp: PositiveInt = 1
    """Virtual pipeline size: model chunks per pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context-parallel size: the tokens of a sequence are split over n ranks."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts are distributed over n ranks."""
    etp: PositiveInt = 1
    """Expert-tensor-parallel size: each expert is split over n ranks."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Megatron's rank order, fastest axis first. With dp last, the stages of a replica are adjacent ranks: a reshard
    sends fewer weights between nodes (counted by `megarl plan`), an update more gradients."""
    align_ranks: Annotated[bool, OnlyIf(*ENGINE, COLOCATED)] = True
    """Permute the trainer's ranks if this saves bytes between nodes in a reshard. Default: true."""
    sequence_parallel: bool | None = None
    """Sequence parallelism: split the activations of norms and residuals over the tensor-parallel ranks. Default: on if
    tp > 1."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks (ZeRO 1)."""
    # Weights are not gathered during the next forward pass, because the engine needs them first.
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks in buckets during the backward pass of an update's last microbatch.
    Default: on if these ranks are on several nodes."""
    router_replay: Annotated[bool, OnlyIf(RL)] = False
    """Router replay (mixture of experts): train each token with the experts chosen by the engine."""
    moe_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """Transport of tokens to experts on other ranks (mixture of experts). alltoall (default): collectives. flex:
    DeepEP's kernels, faster across nodes; needs GPUs, the package deep_ep and etp * ep > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: none (default), selective (trainer.recompute_modules) or full
    (whole layers)."""
    # core_attn saves almost nothing if attention is a flash kernel. With Transformer Engine only the norm before
    # experts is a module of its own. The other norms are part of the next linear layer, so layernorm saves nothing in a
    # dense model.
    recompute_modules: Annotated[tuple[RecomputedModule, ...], OnlyIf(one_of("trainer.recompute", "selective"))] = (
        "core_attn",
    )
    """Parts of a layer recomputed by `recompute: selective`, by Megatron-Core's names: core_attn (default), layernorm,
    mlp (dense layers, most of their activations), moe (routing and experts), moe_act (the experts' activation; needs
    Transformer Engine), shared_experts."""
    # Weights, gradients, norms, attention and the head keep their types. Each layer stores its weights in FP8 twice.
    # Critic, reference, reward model and teachers compute like the policy.
    fp8: Literal["none", "blockwise"] = "none"
    """blockwise: matrix products of the layers in FP8 (E4M3), one scale per block of 128 or 128 x 128 numbers. Needs
    Hopper GPUs or newer, Transformer Engine 2.3, CUDA 12.9 and bfloat16. The engine's products are not in FP8: watch
    logprob_gap/. Default: none."""
    offload: tuple[Literal["optimizer", "gradients", "parameters"], ...] = ()
    """States moved to host memory while the engine samples. Default: none."""
    # Host memory per parameter: 16 bytes (with the gradients) for the rank's share, and 2 for each parameter of the
    # rank, offloaded or not, as copies on their way back. Checkpoints do not depend on the fraction.
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Fraction of the parameters with main weights and moments always in host memory; Adam then steps on the CPU. Saves
    12 bytes per parameter of the rank's share on the GPU, but a step takes seconds per billion parameters and rank.
    Needs Adam, bfloat16, the distributed optimizer and no LoRA. Default: 0."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Limit of tokens, padding included, in one packed microbatch of a data-parallel rank."""
    logprob_chunk_tokens: Annotated[PositiveInt, OnlyIf(LOGPROBS)] = 1024
    """Number of tokens with logits in memory at once while log-probs are computed."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, by their own names. Balancing losses of experts are means
    over tokens: of a whole update (`aux_loss`, `global_aux_loss`; one more forward pass counts each expert's tokens) or
    of each sequence (`seq_aux_loss`)."""
