"""Fields of Megatron-Core's and vLLM's configs derived from other recipe fields.

`trainer.megatron` and `rollout.vllm` cannot set them. The tables name the deciding fields for the error.
"""

from __future__ import annotations

ENGINE_FIELDS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tp",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "max_num_seqs": "rollout.max_concurrent_requests",
    "async_scheduling": "rollout.async_scheduling",
    "return_sampling_mask": "rollout.sampling.top_p, rollout.sampling.top_k and rollout.sampling.min_p",
    "hf_overrides": "model.override_config",
    "max_model_len": "data.max_prompt_tokens and rollout.sampling.max_new_tokens",
}
"""Fields of vLLM's EngineArgs set by megarl, mapped to the recipe field or other source deciding them."""

_MODEL = "the model's config.json"

TRANSFORMER_FIELDS = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "layernorm_epsilon",
            "gated_linear_unit", "activation_func",
        ),
        _MODEL,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16"), "model.dtype"),
    "tensor_model_parallel_size": "trainer.tp",
    "pipeline_model_parallel_size": "trainer.pp",
    "virtual_pipeline_model_parallel_size": "trainer.vpp",
    "context_parallel_size": "trainer.cp",
    "overlap_p2p_comm": "trainer.vpp",
    "batch_p2p_comm": "trainer.vpp",
    "sequence_parallel": "trainer.sequence_parallel",
    "use_cpu_initialization": "the device",
    "variable_seq_lengths": "trainer.pp",
    "moe_token_dispatcher_type": "trainer.moe_dispatcher",
    "deallocate_pipeline_outputs": "trainer.pp",
    "calculate_per_token_loss": "the token weights of the loss",
}  # fmt: skip
"""Fields of Megatron-Core's TransformerConfig decided for every model, mapped to the recipe field or other source
deciding them."""

EXPERT_FIELDS = {
    **dict.fromkeys(
        (
            "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_router_dtype",
            "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
        ),
        _MODEL,
    ),
    "moe_grouped_gemm": "whether Transformer Engine is installed",
    "expert_model_parallel_size": "trainer.ep",
    "expert_tensor_parallel_size": "trainer.etp",
    "moe_enable_routing_replay": "trainer.router_replay",
    **dict.fromkeys(("moe_flex_dispatcher_backend", "moe_enable_deepep"), "trainer.moe_dispatcher"),
}  # fmt: skip
"""Fields of the TransformerConfig of a mixture of experts."""

# With `trainer.recompute: none` users may set these through trainer.megatron.
RECOMPUTE_FIELDS = dict.fromkeys(
    ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"), "trainer.recompute"
)
"""Fields of the TransformerConfig if `trainer.recompute` is not `none`."""

# With `trainer.fp8: none` users may choose another FP8 recipe through trainer.megatron.
FP8_FIELDS = dict.fromkeys(("fp8", "fp8_recipe", "fp8_param"), "trainer.fp8")
"""Fields of the TransformerConfig if `trainer.fp8` is not `none`."""
