"""The recipe's section `trainer`: parallel sizes, memory, precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from megarl.config.section import Section

RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class TrainerConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: attention heads, feed-forward channels and vocabulary are split over this many ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel size: the layers are split over this many stages."""
    dp: PositiveInt | None = None
    """Data-parallel size; default: ranks / (tp * pp * cp)."""
    vpp: PositiveInt = 1
    """Virtual pipeline size: model chunks of each pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context-parallel size: the tokens of a sequence are split over this many ranks."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts are distributed over this many ranks."""
    etp: PositiveInt = 1
    """Expert-tensor-parallel size: each expert is split over this many ranks."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Megatron's rank order, the first axis fastest. With dp last, the stages of a replica are adjacent ranks: weights
    cross fewer nodes in a reshard (`megarl plan` counts that), gradients more in an update."""
    align_ranks: bool = True
    """Permute the trainer's ranks where that saves bytes between nodes in a reshard."""
    sequence_parallel: bool | None = None
    """Sequence parallelism: split the activations of norms and residuals over the tensor-parallel ranks; default: tp >
    1."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks (ZeRO 1)."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks in buckets while the backward pass of an update's last microbatch
    goes on; default: where these ranks are on several nodes. Weights are not gathered beside the next forward pass: the
    engine wants them first."""
    router_replay: bool = False
    """Router replay (mixture of experts): train with the experts that the engine routed each token to."""
    moe_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """How tokens reach their experts on other ranks (mixture of experts): by all-to-all collectives, or by DeepEP's
    kernels (flex), faster across nodes, which need GPUs, the package deep_ep in the environment, and etp * ep > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: of trainer.recompute_modules (selective) or of whole layers
    (full)."""
    recompute_modules: tuple[RecomputedModule, ...] = ("core_attn",)
    """Parts of a layer that `recompute: selective` computes anew, by Megatron-Core's names: core_attn (next to nothing
    is saved where attention is a flash kernel), layernorm (with Transformer Engine that before experts only: the others
    are part of the linear layers behind them, so that a dense model saves nothing by it), mlp (of dense layers, most of
    their activations), moe (routing and experts), moe_act (the experts' activation; needs Transformer Engine),
    shared_experts."""
    fp8: Literal["none", "blockwise"] = "none"
    """Matrix products of the layers in FP8 (E4M3), with a scale for each block of 128 or 128 x 128 numbers; weights,
    gradients, norms, attention and the head stay as they are. Needs Hopper GPUs or newer, Transformer Engine 2.3,
    CUDA 12.9 and bfloat16; the engine's products are not in FP8, so watch logprob_gap/. Each layer keeps its weights in
    FP8 twice. Critic, reference, reward model and teachers compute like the policy."""
    offload: tuple[Literal["optimizer", "gradients", "parameters"], ...] = ()
    """States moved to host memory while the engine samples; default: none."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Fraction of the parameters whose main weights and moments are in host memory all the time, where Adam steps on
    the CPU: 12 bytes a parameter of the rank's share less on the GPU, 16 more in host memory (with the gradients), and
    2 there for each parameter of the rank, whosever share it is: copies on their way back. A step of the optimizer then
    takes seconds a billion parameters and rank. With Adam, bfloat16 and the distributed optimizer, without LoRA.
    Checkpoints are those of any other fraction."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Largest number of tokens, padding included, of one packed microbatch of a data-parallel rank."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at once when log-probs are computed."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, by their own names. Balancing losses of experts are means
    over an update's tokens: `aux_loss` and `global_aux_loss` over all of them (one more forward pass counts each
    expert's tokens), `seq_aux_loss` within each sequence."""
