"""Table of vLLM's EngineArgs fields for `rollout.vllm`: accepted, decided by another field, or refused.

A field that is not in the table is refused: it might need another executor, or keep state of old weights, as a cache
does. The names are those of vLLM 0.30 and vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from megarl.config.libraries.library_settings import reserved_settings

_ACCEPTED = {
    "kernels and their choice: results differ by rounding, which logprob_gap/ measures": """
        attention_backend attention_config compilation_config cudagraph_capture_sizes disable_cascade_attn
        disable_custom_all_reduce enable_flashinfer_autotune enforce_eager gdn_prefill_backend ir_op_priority
        kda_decode_backend kda_prefill_backend kernel_config linear_backend mamba_backend mamba_config
        mamba_ssu_algorithm max_cudagraph_capture_size moe_backend optimization_level performance_mode
        sparse_indexer_topk_backend use_fp64_gumbel
    """,
    "the layout of the KV cache inside the engine, which an update resets": """
        block_size disable_hybrid_kv_cache_manager enable_mamba_cache_stochastic_rounding
        enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint enable_prefix_caching
        kv_cache_dtype_skip_layers mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
        mamba_ssm_cache_dtype prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit
        replayssm_buffer_len swa_bounded_replay use_replayssm
    """,
    "the order and size of engine steps": """
        enable_chunked_prefill long_prefill_token_threshold long_prefill_token_threshold_adaptive
        max_num_active_seqs max_num_batched_tokens max_num_scheduled_tokens prefill_schedule_interval
        scheduler_reserve_full_isl watermark
    """,
    "whole experts on each rank, which layouts and memory plan know": "enable_expert_parallel",
    "draft tokens: a check of its own refuses drafters with weights": "speculative_config",
    "log-probs and logits: a check of its own refuses other values in training": """
        logits_processors logprobs_mode max_logprobs
    """,
    "a token for downloads, which an engine makes none of": "hf_token",
    "checks and traces of the engine's kernels": """
        enable_layerwise_nvtx_tracing fail_on_environ_validation jit_monitor_mode jit_monitor_verbose
    """,
}
"""Fields passed on to vLLM, by the reason why all values are safe."""

_SET_BY_MEGARL = {
    "the process that runs the rank is the engine's executor and worker": """
        distributed_executor_backend worker_cls worker_extension_cls
    """,
    "the trainer sends all weights, so nothing is loaded": """
        download_dir enable_ep_weight_filter ignore_patterns load_format max_parallel_loading_workers
        model_loader_extra_config model_weights pt_load_map_location safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load weight_transfer_config
    """,
    "model.path is a folder, which has configuration and tokenizer": """
        code_revision config_format hf_config_path revision served_model_name skip_tokenizer_init tokenizer
        tokenizer_mode tokenizer_revision
    """,
    "engines release their memory if the trainer needs it (rollout.placement)": """
        enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names
    """,
    "the recipe's kinds of nodes and ranks are bound by megarl": """
        device_ids master_addr master_port nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
    """,
    "a lost rank is noticed and replaced by megarl (cluster.verb_timeout_seconds)": """
        cpu_distributed_timeout_seconds distributed_timeout_seconds enable_fault_tolerance fault_tolerance_config
        shutdown_timeout
    """,
    "stop tokens and sampling are those of rollout.sampling and evaluation.sampling": """
        generation_config override_generation_config
    """,
    "trainer.router_replay asks for the experts of each token": "aux_output_config",
    "layouts of weights are those of vLLM's own implementation": "model_class_overrides model_impl",
    "statistics of vLLM are off, and the metrics perf/ and memory/ replace them": """
        aggregate_engine_logging collect_detailed_traces cudagraph_metrics custom_histogram_buckets disable_log_stats
        enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats kv_cache_metrics
        kv_cache_metrics_sample log_config_file log_level logging_config otlp_traces_endpoint
        per_request_spec_decode_metrics profiler_config show_hidden_metrics_for_version
    """,
}
"""Fields set by megarl, by the reason."""

_REFUSED = {
    "keys and values outside the engine would outlive a weight update, so old ones would be read under new weights": """
        ec_manager_config ec_transfer_config kv_events_config kv_offloading_backend kv_offloading_size
        kv_transfer_config
    """,
    "needs another executor of vLLM; an engine has rollout.tp ranks, and more ranks are more engines": """
        _api_process_count _api_process_rank all2all_backend cp_kv_cache_interleave_size data_parallel_address
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
        data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size
        disable_nccl_for_dp_synchronization dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling
        enable_dbo enable_elastic_ep enable_hc_sp enable_shm_tensor_arena pipeline_parallel_size
        prefill_context_parallel_size ray_workers_use_nsight ubatch_size
    """,
    "a reshard writes each weight to the place that it had at the start": """
        cpu_offload_gb cpu_offload_params enable_eplb engram_config eplb_config expert_placement_strategy
        offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
    """,
    "the engine would sample from another distribution than the one that is trained": """
        diffusion_config disable_sliding_window enable_trace_replay kv_sharing_fast_prefill watermark_config
    """,
    "short for rollout.vllm.speculative_config, which a check of its own reads: write it there": """
        spec_method spec_model spec_tokens
    """,
    "code of the model's folder or of a plugin is never run": "additional_config trust_remote_code",
    "engine steps are driven by megarl, which knows vLLM's own scheduler only": """
        max_num_queued_reqs max_num_queued_tokens scheduler_cls scheduling_policy stream_interval tokens_only
    """,
    "engines of megarl sample text from text": """
        allowed_local_media_path allowed_media_domains convert default_mm_loras disable_chunked_mm_input
        enable_mm_embeds enable_prompt_embeds enable_tower_connector_lora interleave_mm_strings io_processor_plugin
        language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
        mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc pooler_config renderer_num_workers runner skip_mm_profiling
        video_pruning_method video_pruning_rate
    """,
    "tool calls and thoughts are read by megarl, and no request has a grammar": """
        reasoning_config reasoning_parser reasoning_parser_plugin structured_outputs_config
    """,
}
"""Fields that no run may set, by the reason."""


def _index_by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


@cache
def accepted_fields() -> dict[str, str]:
    return _index_by_name(_ACCEPTED)


@cache
def refusals_by_field() -> dict[str, str]:
    """Return the refused fields of `rollout.vllm`, each with reason and remedy for the end of an error."""
    refused_always = {name: f"{reason}; remove it" for name, reason in _index_by_name(_REFUSED).items()}
    set_by_megarl = {
        name: f"megarl sets it: {reason}; remove it" for name, reason in _index_by_name(_SET_BY_MEGARL).items()
    }
    decided_elsewhere = {name: f"set {field} instead" for name, field in reserved_settings("vllm").items()}
    return refused_always | set_by_megarl | decided_elsewhere


def engine_field_fault(name: str) -> str | None:
    """Return why `rollout.vllm` refuses a field, and the remedy; None: it is accepted."""
    if name in accepted_fields():
        return None
    unknown = "megarl does not know what this field of vLLM does to an engine whose weights change; remove it"
    return refusals_by_field().get(name, unknown)
