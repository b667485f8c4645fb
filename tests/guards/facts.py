"""Facts about the libraries that megarl relies on and no type says, by library and by the versions they were read in.

`tests/guards/test_facts.py` asserts them on the sources that are installed: an upgrade that changes one fails there,
with the reason. A new version: read each fact anew, then its number.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = {
    "vllm": ("0.30.0", "0.32.0"),
    "torch": ("2.13.0",),
    "megatron": ("0.16.1", "0.19.2"),
    "transformer_engine": ("2.11.0", "2.20.2"),
    "flashinfer": ("0.6.18", "0.7.0"),
}
"""By the name of the imported package: those of launch/versions-*.txt. vLLM's build for the CPU has the same Python
sources.
"""


@dataclass(frozen=True)
class Source:
    """Text in a function or class of a library's file; runs of white space count as one."""

    library: str
    file: str
    scope: str
    text: str
    why: str
    is_there: bool = True
    newer_text: str = ""
    """Text in the place of `text` in a newer version of `VERSIONS`, with the same consequence."""
    versions: tuple[str, ...] = ()
    """Versions of the library that have this fact. Empty: all in `VERSIONS`."""


@dataclass(frozen=True)
class Signature:
    """Parameters that a function of a library takes by these names."""

    library: str
    file: str
    scope: str
    parameters: tuple[str, ...]


SOURCES = (
    # vLLM
    Source(
        "vllm", "model_executor/layers/linear.py", "UnquantizedLinearMethod.process_weights_after_loading",
        "current_platform.is_cuda", "on CUDA the weights of plain linear layers lie as they were loaded", False,
    ),
    Source(
        "vllm", "v1/worker/gpu_worker.py", "Worker.sleep",
        "name: buffer.cpu().clone() for name, buffer in model.named_buffers()",
        "buffers such as _expert_map survive sleep level 2",
    ),
    Source(
        "vllm", "v1/worker/gpu_worker.py", "Worker.determine_available_memory",
        "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:",
        "rollout.kv_cache_gib skips the arithmetic of gpu_memory_utilization",
    ),
    Source(
        "vllm", "distributed/parallel_state.py", "init_distributed_environment",
        "if not torch.distributed.is_initialized():", "the engine joins the trainer's world",
    ),
    Source(
        "vllm", "config/vllm.py", "VllmConfig.use_v2_model_runner",
        "use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER if use_v2_model_runner is not None: return",
        "VLLM_USE_V2_MODEL_RUNNER=0 leads back to the older model runner",
    ),
    Source(
        "vllm", "model_executor/models/gpt_oss.py", "GptOssModel._load_weights_other",
        "if tp_rank != 0: weight.zero_()", "experts' output biases are zeros on all but the first rank",
    ),
    Source(
        "vllm", "model_executor/models/gpt_oss.py", "GptOssModel._load_weights_other",
        "param.copy_(narrow_weight)", "a reload would lose experts and sinks: engine.full_tensors avoids it",
    ),
    Source(
        "vllm", "model_executor/models/gpt_oss.py", "OAIAttention._build_attention",
        "config.sliding_window if self.layer_idx % 2 == 0 else None", "the page refuses other layer_types",
    ),
    Source(
        "vllm", "model_executor/layers/activation.py", "SwigluOAIAndMul.__init__",
        "alpha: float = 1.702, limit: float = 7.0", "the page refuses other constants of gpt-oss's experts",
    ),
    Source(
        "vllm", "config/compilation.py", "PassConfig", "fuse_allreduce_rms: bool",
        "the pass that needs a CUDA compiler is switched off by this name",
    ),
    Source(
        "vllm", "v1/engine/core.py", "EngineCore.step_with_batch_queue",
        "future = self.model_executor.sample_tokens( grammar_output, non_block=True )",
        "under asynchronous scheduling the sampling of each step is asked for apart: engine.executor has it already",
    ),
    Source(
        "vllm", "v1/core/sched/scheduler.py", "Scheduler.schedule",
        "if self._pause_state == PauseState.PAUSED_ALL: # Do not schedule any requests when paused. token_budget = 0",
        "what was begun ahead is read without beginning more",
    ),
    Source(
        "vllm", "config/vllm.py", "VllmConfig.max_concurrent_batches",
        "if self.use_v2_model_runner: return pp_size + 1",
        "no more than one step is begun ahead: followers wait for the one before",
    ),
    Source(
        "vllm", "model_executor/layers/quantization/online/fp8.py", "_Fp8OnlineMoEBase._setup_kernel",
        "w13, w2, w13_scale, w2_scale = convert_to_fp8_moe_kernel_format(",
        "quantised experts are laid out by this function, which the reshard calls without the new kernel",
    ),
    Source(
        "vllm", "model_executor/layers/quantization/online/fp8.py",
        "Fp8PerBlockOnlineLinearMethod.process_weights_after_loading",
        "self.fp8_linear.process_weights_after_loading(layer)",
        "a linear layer's kernel lays its weights out within the method that quantises them",
    ),
    Source(
        "vllm", "model_executor/model_loader/reload/layerwise.py", "_layerwise_process",
        'delattr(layer, "_already_called_process_weights_after_loading")',
        "without this attribute a module quantises again",
    ),
    Source(
        "vllm", "compilation/backends.py", "", 'local_cache_dir = os.path.join(cache_dir, f"rank_{rank}_{dp_rank}"',
        "compiled code is cached by the rank in the engine's world, so each device has a root of its own",
    ),
    Source(
        "vllm", "envs.py", "compile_factors", '"VLLM_CACHE_ROOT",',
        "the root of the caches is not part of their names",
    ),
    # FlashInfer
    Source(
        "torch", "cuda/memory.py", "_set_allocator_settings", "return torch._C._accelerator_setAllocatorSettings(env)",
        "platform.memory.allocator changes the settings after the engine was built by this function",
    ),
    Source(
        "vllm", "device_allocator/cumem.py", "CuMemAllocator.use_memory_pool",
        'expandable_was_enabled = "expandable_segments:True" in conf',
        "the pool of a sleeping engine looks at the environment alone, so the engine is built before the setting",
        # It looks at the live setting first: both orders work.
        newer_text="expandable_was_enabled = conf_flag_enabled(prev_conf, EXPANDABLE_SEGMENTS)",
    ),
    Source(
        "flashinfer", "jit/cpp_ext.py", "get_cuda_path", 'os.environ.get("CUDA_HOME")',
        "ranks tell it the toolkit through CUDA_HOME",
    ),
    Source(
        "flashinfer", "jit/cpp_ext.py", "generate_ninja_build_for_op",
        '"-L$cuda_home/lib64", "-L$cuda_home/lib64/stubs"',
        "launch/setup.sh lays the wheels' libraries out in lib64 and lib64/stubs",
    ),
    # Transformer Engine
    Source(
        "transformer_engine", "common/__init__.py", "", 'os.path.join(nvidia_dir, "cu13"',
        "its loader finds the libraries of CUDA 13's wheels",
    ),
    Source(
        "transformer_engine", "pytorch/attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.forward", "cu_seqlens_q_padded is not None and not torch.equal(",
        "padded lengths cost no synchronisation: none are given at cp 1, and newer versions compare identities",
        newer_text="if ( cu_seqlens_q_padded is cu_seqlens_q and cu_seqlens_kv_padded is cu_seqlens_kv ): "
        "pad_between_seqs = False",
    ),
    *(
        Source(
            "transformer_engine", f"pytorch/module/{file}.py", f"{name}.__init__",
            "self.fuse_wgrad_accumulation = fuse_wgrad_accumulation",
            "the switch that models.policy.accumulate_in_main_gradients turns",
        )
        for file, name in (
            ("linear", "Linear"), ("layernorm_linear", "LayerNormLinear"), ("grouped_linear", "GroupedLinear"),
        )
    ),
    Source(
        "transformer_engine", "pytorch/module/base.py", "TransformerEngineBaseModule.set_extra_state",
        "if state.numel() == 0: return # Default format: byte tensor with pickled data state = pickle.loads(",
        "an empty tensor is not unpickled: training.state.checkpoint.without_pickles",
        newer_text="if state.numel() == 0: return state_bytes = state.detach()",
    ),
    Source(
        "transformer_engine", "pytorch/tensor/float8_blockwise_tensor.py", "Float8BlockQuantizer.is_quantizable",
        "if math.prod(inp.shape[:-1]) % self.block_len != 0: return False",
        "what is gathered in FP8 is made of whole blocks: config.parallel.FP8_BLOCK",
        newer_text="if math.prod(shape[:-1]) % self.block_len != 0: return False",
    ),
    Source(
        "transformer_engine", "pytorch/module/base.py", "TransformerEngineBaseModule.__init__",
        "self._fp8_workspaces: Dict[str, QuantizedTensor] = {}",
        "copies of the weights in FP8 are freed by this name: training.model",
    ),
    # Megatron-Core
    Source(
        "megatron", "core/transformer/moe/moe_utils.py", "topk_routing_with_score_function",
        "return fused_topk_with_score_function(", "the fused router knows no replay: it is off under router_replay",
    ),
    Source(
        "megatron", "core/transformer/mlp.py", "MLP.forward",
        "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)",
        "experts with biases need an output of their own: models.experts",
    ),
    Source(
        "megatron", "core/transformer/attention.py", "Attention.forward",
        "if packed_seq_params.cu_seqlens_q_padded is not None:", "padded lengths may be left out",
    ),
    Source(
        "megatron", "core/models/common/embeddings/rope_utils.py", "_apply_rotary_pos_emb_thd", ".tolist()",
        "the rope that is not fused reads lengths from the GPU",
    ),
    Source(
        "megatron", "core/dist_checkpointing/validation.py", "_validate_sharding_for_key",
        "if not has_regular_sharding_grid: # In case of uneven sharding we defer the validation to DCP return",
        "an optimizer's ranges are saved as boxes of any size: training.state.optimizer_state",
    ),
    Source(
        "megatron", "core/optimizer/distrib_optimizer.py", "DistributedOptimizer._get_main_param_and_optimizer_states",
        "if isinstance(self.optimizer, HybridDeviceOptimizer): tensors[k] = self.optimizer.state[sharded_model_param]"
        "[k] continue",
        "what is on the host is saved in place: training.host.host_optimizer",
    ),
    Source(
        "megatron", "core/optimizer/cpu_offloading/hybrid_optimizer.py",
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        "if offload_params_numel < offload_threshold and param.is_cuda: param = "
        "param.detach().clone().cpu().pin_memory() offload_params_numel += param.numel()",
        "memory.trainer counts what is taken to the host; platform.cpu.megatron_patches repeats it",
    ),
    Source(
        "megatron", "core/optimizer/cpu_offloading/hybrid_optimizer.py",
        "HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
        'new_state[orig_param] = optimizer.state[param] if self.param_update_in_fp32: '
        'new_state[orig_param]["master_param"] = param',
        "the state of both is one dictionary: training.host.host_optimizer fills that of the parts",
    ),
    Source(
        "megatron", "core/optimizer/__init__.py", "_get_megatron_optimizer_based_on_param_groups",
        "param_update_in_fp32=True,", "main weights are float32 wherever the optimizer works",
    ),
    Source(
        "megatron", "core/pipeline_parallel/schedules.py", "forward_backward_no_pipelining",
        "with no_sync_func():", "trainer.overlap_grad_reduce: nothing is reduced before the last microbatch",
    ),
    Source(
        "megatron", "core/pipeline_parallel/schedules.py", "forward_backward_pipelining_with_interleaving",
        "if isinstance(no_sync_func, list):", "each chunk has a context of its own",
    ),
    Source(
        "megatron", "core/pipeline_parallel/p2p_communication.py", "P2PCommunicator._communicate",
        "self._communicate_shapes( tensor_send_next, tensor_send_prev, recv_prev, recv_next )",
        "training.stage_shapes returns the shapes that Megatron would exchange",
    ),
    Source(
        "megatron", "core/transformer/moe/token_dispatcher.py", "MoEAlltoAllTokenDispatcher.dispatch_preprocess",
        "self.tokens_per_expert = self.preprocess(self.routing_map)",
        "models.experts.dispatch sets the sizes of the exchanges in preprocess",
    ),
    Source(
        "megatron", "core/distributed/param_and_grad_buffer.py", "_ParamAndGradBucketGroup.reset",
        "assert len(self.per_param_grad_ready_counts) == len(self.params)",
        "under trainer.overlap_grad_reduce every parameter has a gradient in an update's last microbatch",
    ),
    Source(
        "megatron", "core/transformer/moe/fused_a2a.py", "", "from deep_ep import Buffer",
        "trainer.moe_dispatcher flex needs the package of that name",
    ),
    Source(
        "megatron", "core/transformer/moe/token_dispatcher.py", "MoEFlexTokenDispatcher.__init__",
        'assert self.tp_size * self.ep_size > 1', "experts that are all on one rank have the other dispatcher",
    ),
    Source(
        "megatron", "core/transformer/transformer_config.py", "TransformerConfig.__post_init__",
        '"moe_enable_deepep is deprecated."', "DeepEP is chosen by moe_flex_dispatcher_backend",
    ),
    Source(
        "megatron", "core/fp8_utils.py", "",
        'elif config.fp8_recipe == Fp8Recipe.blockwise and is_te_min_version("2.3.0.dev0"): '
        "fp8_recipe = transformer_engine.common.recipe.Float8BlockScaling(",
        "trainer.fp8 blockwise",
    ),
    Source(
        "megatron", "core/tensor_parallel/layers.py", "", "import fused_weight_gradient_mlp_cuda",
        "Megatron's own fused accumulation is apex's: models.configuration asks `_grad_accum_fusion_available`",
    ),
)  # fmt: skip

SIGNATURES = (
    Signature(
        "torch", "nn/attention/varlen.py", "varlen_attn",
        ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"),
    ),
    Signature(
        "torch", "distributed/checkpoint/filesystem.py", "_write_item",
        ("transforms", "stream", "data", "write_item", "storage_key", "serialization_format"),
    ),
    Signature("torch", "distributed/distributed_c10d.py", "all_to_all_single",
        ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
    ),
    Signature("vllm", "engine/arg_utils.py", "EngineArgs", (
        "model", "dtype", "seed", "max_model_len", "tensor_parallel_size", "max_num_seqs", "kv_cache_memory_bytes",
        "distributed_executor_backend", "load_format", "logprobs_mode", "enable_prefix_caching", "enable_sleep_mode",
        "moe_backend", "async_scheduling", "disable_log_stats", "compilation_config", "hf_overrides",
    )),
    Signature(
        "vllm", "v1/executor/uniproc_executor.py", "AsyncOutputFuture.__init__", ("async_output", "single_value")
    ),
    Signature("vllm", "v1/worker/gpu_worker.py", "Worker.sleep", ("level",)),
    Signature("vllm", "v1/worker/gpu_worker.py", "Worker.wake_up", ("tags",)),
    Signature("vllm", "device_allocator/cumem.py", "CuMemAllocator.sleep", ("offload_tags",)),
    Signature("vllm", "v1/worker/gpu/model_runner.py", "GPUModelRunner.execute_model", ("scheduler_output",)),
    Signature("vllm", "v1/worker/gpu/model_runner.py", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Signature("vllm", "v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Signature("transformer_engine", "pytorch/attention/rope.py", "apply_rotary_pos_emb", (
        "t", "freqs", "tensor_format", "interleaved", "fused", "cu_seqlens", "cp_size", "cp_rank",
    )),
    Signature(
        "transformer_engine", "pytorch/attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.forward",
        (
            "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded",
            "max_seqlen_q", "max_seqlen_kv", "attn_mask_type",
        ),
    ),
    Signature("transformer_engine", "pytorch/router.py", "fused_topk_with_score_function", (
        "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function",
        "expert_bias",
    )),
    Signature("transformer_engine", "pytorch/optimizers/fused_adam.py", "FusedAdam.__init__",
        ("params", "lr", "betas", "eps", "weight_decay"),
    ),
    Signature("megatron", "core/dist_checkpointing/mapping.py", "ShardedTensor", (
        "key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id",
        "prepend_axis_num", "allow_shape_mismatch",
    )),
    Signature("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig", (
        "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads",
        "use_precision_aware_optimizer", "store_param_remainders",
    )),
    Signature(
        "megatron", "core/optimizer/cpu_offloading/hybrid_optimizer.py", "HybridDeviceOptimizer.__init__",
        (
            "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads",
            "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
        ),
    ),
    Signature("megatron", "core/optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32",
        ("parameters", "max_norm", "total_norm", "use_decoupled_grad"),
    ),
    Signature(
        "megatron", "core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig",
        ("grad_reduce_in_fp32", "overlap_grad_reduce", "use_distributed_optimizer", "bucket_size"),
    ),
    Signature("megatron", "core/transformer/transformer_config.py", "TransformerConfig",
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"),
    ),
    Signature("megatron", "core/parallel_state.py", "initialize_model_parallel", (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "order",
        "create_gloo_process_groups",
    )),
)  # fmt: skip
