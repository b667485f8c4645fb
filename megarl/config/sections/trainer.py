"""Recipe section `trainer`: parallel sizes, memory, precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.annotations import Decides, OnlyIf, UntriedOnGpu
from megarl.config.conditions import (
    COLOCATED,
    ENGINE,
    LOGPROBS,
    NOT_EXACT,
    ON_POLICY,
    RL,
    TRAINED_LOGPROBS,
    non_empty,
    one_of,
)
from megarl.config.parallel import EXACT_ROWS, FP8_BLOCK
from megarl.config.section import Section

RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class TrainerConfig(Section):
    """Parallel sizes, memory and precision of the Megatron trainer."""

    tp: Annotated[PositiveInt, Decides(megatron="tensor_model_parallel_size")] = 1
    """Tensor-parallel size: attention heads, feed-forward channels and vocabulary are split over n ranks."""
    pp: Annotated[
        PositiveInt,
        Decides(
            megatron="pipeline_model_parallel_size pipeline_model_parallel_layout variable_seq_lengths "
            "deallocate_pipeline_outputs"
        ),
    ] = 1
    """Pipeline-parallel size: the layers are split over n stages."""
    dp: PositiveInt | None = None
    """Data-parallel size. Default: the trainer's ranks / (tp * pp * cp)."""
    vpp: Annotated[
        PositiveInt,
        Decides(megatron="virtual_pipeline_model_parallel_size overlap_p2p_comm batch_p2p_comm batch_p2p_sync"),
    ] = 1
    """Virtual pipeline size: number of model chunks per pipeline stage (interleaved schedule)."""
    cp: Annotated[PositiveInt, Decides(megatron="context_parallel_size")] = 1
    """Context-parallel size: the tokens of a sequence are split over n ranks."""
    ep: Annotated[PositiveInt, Decides(experts="expert_model_parallel_size")] = 1
    """Expert-parallel size: the experts are distributed over n ranks."""
    etp: Annotated[PositiveInt, Decides(experts="expert_tensor_parallel_size")] = 1
    """Expert-tensor-parallel size: each expert is split over n ranks."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Megatron's order of parallel dimensions over ranks, fastest first. With dp last, a replica's pipeline stages are
    neighbouring ranks: a reshard sends fewer bytes between nodes, an update more. `megarl plan` counts the bytes."""
    align_ranks: Annotated[bool, OnlyIf(*ENGINE, COLOCATED)] = True
    """Permute the trainer's ranks if a reshard then sends fewer bytes between nodes. Default: true."""
    sequence_parallel: Annotated[bool | None, Decides(megatron="sequence_parallel")] = None
    """Sequence parallelism: split activations of norms and residual connections over the tensor-parallel ranks.
    Default: on if tp > 1."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks (ZeRO stage 1)."""
    # Weights are not gathered during the next forward pass, because the engine needs them first.
    overlap_grad_reduce: bool | None = None
    """Overlap the reduction of gradients over data-parallel ranks with the backward pass of an update's last
    micro-batch, bucket by bucket. Default: on if these ranks are on several nodes."""
    router_replay: Annotated[
        bool,
        OnlyIf(RL),
        UntriedOnGpu("true"),
        Decides(experts="moe_enable_routing_replay", vllm="enable_return_routed_experts"),
    ] = False
    """Router replay (mixture of experts): train each token with the experts that the engine chose when it sampled the
    token. Default: false."""
    moe_dispatcher: Annotated[
        Literal["alltoall", "flex"],
        UntriedOnGpu("flex"),
        Decides(megatron="moe_token_dispatcher_type", experts="moe_flex_dispatcher_backend moe_enable_deepep"),
    ] = "alltoall"
    """How tokens are sent to experts on other ranks (mixture of experts). alltoall (default): collectives. flex:
    DeepEP's kernels, faster between nodes; needs GPUs, the package deep_ep and etp * ep > 1."""
    recompute: Annotated[
        Literal["none", "selective", "full"],
        Decides(recompute="recompute_granularity recompute_modules recompute_method recompute_num_layers"),
    ] = "none"
    """Recomputation of activations in the backward pass. none. selective: only trainer.recompute_modules. full: whole
    layers. Default on GPUs: the first of these that leaves 8 GiB in an update, by `megarl plan`'s prediction; on CPUs:
    none. The run folder's config.yaml records the value."""
    # core_attn saves almost nothing if attention is a flash kernel. With Transformer Engine only the norm before
    # experts is a module of its own. The other norms are part of the next linear layer, so layernorm saves nothing in a
    # dense model.
    recompute_modules: Annotated[tuple[RecomputedModule, ...], OnlyIf(one_of("trainer.recompute", "selective"))] = (
        "core_attn",
    )
    """Parts of a layer recomputed with recompute=selective, by Megatron-Core's names: core_attn (default), layernorm,
    mlp (dense layers; most of their activations), moe (routing and experts), moe_act (the experts' activation function;
    needs Transformer Engine), shared_experts."""
    # Weights, gradients, norms, attention and the head keep their types. Each layer stores its weights in FP8 twice.
    # Critic, reference, reward model and teachers compute like the policy.
    fp8: Annotated[Literal["none", "blockwise"], UntriedOnGpu("blockwise"), Decides(fp8="fp8 fp8_recipe fp8_param")] = (
        "none"
    )
    """FP8 training. Default: none. blockwise: matrix products of the layers in FP8 (E4M3), one scale per block of 128
    or 128 x 128 numbers. Needs Hopper GPUs or newer, Transformer Engine 2.3, CUDA 12.9 and bfloat16. The engines do not
    compute in FP8, so the metrics logprob_gap/ increase."""
    offload: Annotated[tuple[Literal["optimizer", "gradients", "parameters"], ...], OnlyIf(*ENGINE)] = ()
    """Trainer states moved to host memory while the engines sample; gradients are dropped. Default on GPUs: the fewest
    that leave 8 GiB free and a KV cache for the step's concurrent requests, by `megarl plan`'s prediction; on CPUs:
    none. The run folder's config.yaml records the value."""
    # Host memory: 16 bytes per offloaded parameter of the rank's share (with gradients), and 2 bytes for every
    # parameter of the rank, for copies on their way back. Checkpoints do not depend on the fraction.
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0), UntriedOnGpu("values above 0")] = 0.0
    """Fraction of the parameters with optimizer state (main weights, moments) in host memory, updated by the CPU.
    Default: 0. Saves 12 bytes of GPU memory per parameter on the rank; a step takes seconds longer per billion
    parameters. Needs Adam, bfloat16, distributed_optimizer and no LoRA."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Maximum number of tokens in one micro-batch of packed sequences per data-parallel rank, padding included. A
    prefix computed once (trainer.share_prefixes) counts once."""
    max_tokens_per_forward: PositiveInt | None = None
    """Maximum number of tokens in one micro-batch of a pass without gradients: log-probs, values, scores, teachers.
    Default: max_tokens_per_microbatch; on GPUs of known memory up to 8 times as many, if the pass is predicted to need
    no more memory than an update."""
    share_prefixes: Annotated[Literal["auto", "off"], UntriedOnGpu("auto")] = "off"
    """Compute a prefix shared by sequences of a micro-batch only once, such as a group's prompt. off (default): compute
    each sequence separately. auto: share prefixes where this saves more than 5 % of a micro-batch's FLOPs; results
    differ by rounding only. See megarl/training/README.md."""
    # Operators that differ between trainer and engine get the engine's arithmetic (`models.exact`).
    exact: Annotated[bool, OnlyIf(ON_POLICY)] = False
    """Compute the trainer's log-probs with the engine's arithmetic, so that both are bit-equal. If a token differs, the
    step's updates are skipped and the run ends. Default: false. Needs bfloat16, with trainer and engine on CPUs;
    refused on GPUs, where it is untried, and for some models. Metric: logprob_gap/bit_equal."""
    # `families.logprob_chunks` chooses the default by vocabulary and hidden size, type, and tokens of a row.
    logprob_chunk_tokens: Annotated[PositiveInt | None, OnlyIf(LOGPROBS)] = None
    """Number of tokens for which log-probs are computed at a time, to limit the memory of the logits. Default on GPUs:
    chosen to cost at most 2 % of the head's time, with at most 1 GiB of logits; on CPUs: 1024. `megarl show-config`
    prints it."""
    # An update then has three matrix products of the head instead of four (`models.logprobs`).
    keep_logits: Annotated[bool | None, OnlyIf(*TRAINED_LOGPROBS, NOT_EXACT), UntriedOnGpu("true", tried=False)] = None
    """Keep a micro-batch's logits from the forward to the backward pass, instead of computing them again. Needs memory
    for trainer.max_tokens_per_microbatch times the vocabulary, in the model's type. Default: on if an update is
    predicted to leave 8 GiB of a GPU, or the logits fit into trainer.logprob_chunk_tokens."""
    # The gradient norm, used for clipping, excludes the MTP layers.
    mtp_loss_coefficient: Annotated[
        PositiveFloat | None, OnlyIf(LOGPROBS), Decides(megatron="mtp_num_layers mtp_loss_scaling_factor")
    ] = None
    """Weight of the loss that trains the model's layers for multi-token prediction (MTP). Default: none, they are only
    copied. The engine drafts tokens with these layers (method mtp of rollout.vllm.speculative_config). The policy's
    gradient stays the same."""
    mtp_targets: Annotated[
        Literal["tokens", "distribution"], OnlyIf(non_empty("trainer.mtp_loss_coefficient", "0.1"))
    ] = "tokens"
    """Targets of the MTP layers. tokens (default): the trained token two positions ahead. distribution: the policy's
    whole distribution of that token, detached (forward KL; the soft loss of EAGLE-3, arXiv 2503.01840), for one more
    product with the head."""
    drafter_learning_rate: Annotated[PositiveFloat | None, OnlyIf(*ENGINE), UntriedOnGpu("all values")] = None
    """Peak learning rate of the engines' EAGLE-3 drafter (arXiv 2503.01840), with optimizer.schedule. The drafter
    learns from the policy's hidden states and does not change the policy's gradient. The engines and the export get its
    new weights with the policy's. Default: none, the drafter is frozen."""
    drafter_steps: Annotated[PositiveInt, OnlyIf(non_empty("trainer.drafter_learning_rate", "1e-4"))] = 3
    """Steps of the drafter in an update (training-time test of EAGLE-3, section 3.2): step k reads the drafter's own
    states of the k - 1 steps before. Use num_speculative_tokens of rollout.vllm.speculative_config. Each step costs
    about one layer and two products with the drafter's head. Default: 3."""
    drafter_step_decay: Annotated[
        PositiveFloat, Field(le=1), OnlyIf(non_empty("trainer.drafter_learning_rate", "1e-4"))
    ] = 0.8
    """Weight of each step of the drafter relative to the step before: later drafts count only if earlier ones are
    accepted. 1: all weigh alike. Default: 0.8, as in EAGLE's code."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, by Megatron's names. moe_router_load_balancing_type:
    `seq_aux_loss` balances experts over each sequence, `aux_loss` and `global_aux_loss` over an update. These two cost
    one more forward pass, to count each expert's tokens."""

    @property
    def trains_draft_layers(self) -> bool:
        return self.mtp_loss_coefficient is not None

    @property
    def draft_layers_setting(self) -> str | None:
        """Field and value that train draft layers (MTP), for messages, or None."""
        coefficient = self.mtp_loss_coefficient
        return None if coefficient is None else f"trainer.mtp_loss_coefficient = {coefficient:g}"

    @property
    def token_block(self) -> int:
        """Each rank's part of a packed row is a multiple of these tokens."""
        if self.fp8 == "blockwise":
            return FP8_BLOCK
        return EXACT_ROWS if self.exact else 1
