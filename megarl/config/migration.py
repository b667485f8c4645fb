"""Options of verl, TRL, slime, NeMo-RL, OpenRLHF, AReaL, prime-rl and ColossalRL, with the recipe's fields.

The error for an unknown recipe key names its counterpart. Names are matched from their end: `rollout.n` also matches
`actor_rollout_ref.rollout.n`. Case, dashes and underscores make no difference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Options of other training programs with the same meaning, and the recipe fields replacing them."""

    names: tuple[str, ...]
    fields: tuple[str, ...] = ()
    """Recipe fields with the meaning of these options. Empty: megarl has no such fields."""
    note: str = ""
    """Difference in meaning, or the reason why there is no counterpart."""

    def __str__(self) -> str:
        """Return a hint for an error message, for example `here it is train.samples_per_prompt`."""
        note = f" ({self.note})" if self.note and self.fields else self.note
        return f"here it is {' and '.join(self.fields)}{note}" if self.fields else f"has no counterpart: {note}"


def counterpart(name: str) -> Counterpart | None:
    """Return the recipe's counterpart of a dotted name, or None if it is not listed."""
    parts = _plain(name).split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_BY_NAME[tail] for tail in tails if tail in _BY_NAME), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


COUNTERPARTS = (
    # Model
    Counterpart(
        ("model_name_or_path", "model_name", "pretrain", "hf_checkpoint", "actor_rollout_ref.model.path", "ref_load"),
        ("model.path",),
    ),
    Counterpart(("torch_dtype", "bf16", "param_dtype", "precision", "policy.dtype", "mixed_precision"),
                ("model.dtype",)),
    Counterpart(("tokenizer_dir", "tokenizer_path", "tokenizer_name", "tokenizer_name_or_path"),
                note="the tokenizer is the one in the folder model.path"),
    Counterpart(("use_liger_kernel", "use_flash_attn", "use_flash_attention_2", "attn_implementation"),
                note="Megatron-Core and vLLM choose their kernels; trainer.megatron and rollout.vllm change them"),
    Counterpart(("trust_remote_code",), note="code of a model folder is never run; use a model without code"),
    Counterpart(("ref_model", "reference_model"), note="the reference is the initial model, model.path"),
    Counterpart(("sync_ref_model", "ref_model_sync_steps", "ref_update_steps", "ref_update_interval"),
                ("algorithm.reference_update_steps",)),
    Counterpart(("ref_model_mixup_alpha",), ("algorithm.reference_mixing",)),
    Counterpart(
        ("override_config", "hf_config_overrides", "hf_overrides", "rope_scaling", "rope_theta", "rotary_base"),
        ("model.override_config",),
        "fields without influence on the weights' shapes",
    ),
    # Data
    Counterpart(
        ("train_files", "prompt_data", "dataset_name", "train_data_path", "train_data.path", "train_data", "dataset",
         "prompt_dataset", "data.path"),
        ("data.train",),
    ),
    Counterpart(
        ("val_files", "eval_prompt_data", "eval_dataset", "val_data_path", "test_files", "test_data_path",
         "test_data.path", "test_data"),
        ("data.validation",),
        "sources by name",
    ),
    Counterpart(("label_key", "ground_truth_key"), ("data.answer_field",)),
    Counterpart(("prompt_key", "input_key"), ("data.fields",), "{prompt: NAME}"),
    Counterpart(
        ("apply_chat_template", "return_raw_chat"),
        ("model.chat_template",),
        "plain writes only the contents",
    ),
    Counterpart(
        ("max_prompt_length", "prompt_max_len", "rollout_max_prompt_len", "max_input_seq_length"),
        ("data.max_prompt_tokens",),
    ),
    Counterpart(
        ("filter_overlong_prompts", "data.truncation"), ("data.overlong",), "prompts are never cut"
    ),
    Counterpart(("test_ratio",), note="put held-out records into a separate file and name it in data.validation"),
    Counterpart(("pretrain_data", "ptx_dataset"), ("data.ptx",)),
    Counterpart(("disable_loss_mask",), note="sft trains on the assistant's tokens alone"),
    Counterpart(("shuffle_dataset", "rollout_shuffle"), ("data.shuffle",)),
    Counterpart(("chat_template_path", "custom_chat_template", "conversation_template_config"),
                ("model.chat_template",)),
    Counterpart(("apply_chat_template_kwargs",), ("model.chat_template_kwargs",)),
    Counterpart(("dataset_streaming", "use_streaming_dataset"), ("data.streaming",)),
    # Batches and length of the run
    Counterpart(
        (
            "rollout_batch_size", "num_prompts_per_step", "data.train_batch_size",
            "train.batch_size", "batch_size", "prompts_per_rollout",
        ),
        ("train.prompts_per_step",),
    ),
    Counterpart(("inference_batch_size",), ("train.prompts_per_step",), "over all inferencers: ibs * num_inferencer"),
    Counterpart(
        ("train_batch_size",),
        ("train.prompts_per_step", "train.updates_per_step"),
        "verl: prompts of a step; OpenRLHF: samples of an update; ColossalRL: updates_per_step is ibs * num_inferencer "
        "/ (tbs * dp)",
    ),
    Counterpart(
        ("train_minibatch_size",),
        note="prompts of one forward batch change no update; trainer.max_tokens_per_microbatch limits a forward "
        "pass",
    ),
    Counterpart(("num_collect_steps", "experience_batch_size"), ("train.prompts_per_step",),
                "the two multiplied, over all ranks"),
    Counterpart(("num_update_steps",), ("train.epochs_per_step",)),
    Counterpart(("consumer_batch_size",), ("train.prompts_per_step",)),
    Counterpart(("critic.update_per_rollout",), ("critic.updates_per_step",)),
    Counterpart(("update_per_rollout",), ("train.updates_per_step",)),
    Counterpart(("ptx_batch_size",), ("algorithm.ptx_conversations",), "of a step"),
    Counterpart(("accumulation_steps",), ("trainer.max_tokens_per_microbatch",),
                "the number of microbatches follows"),
    Counterpart(("max_length_per_device", "max_inference_length_per_device"), ("trainer.max_tokens_per_microbatch",),
                "of a data-parallel rank"),
    Counterpart(("gen_batch_size", "over_sampling_batch_size"), ("algorithm.oversampling",), "over prompts a step"),
    Counterpart(
        ("partial_rollout", "rollout.partial_rollout", "async_training.partial_rollout"),
        ("rollout.stragglers", "algorithm.oversampling"),
        "park, and the ratio of further prompts",
    ),
    Counterpart(
        ("rollout.n", "num_generations", "n_samples_per_prompt", "num_generations_per_prompt", "responses_per_prompt",
         "rollouts_per_example"),
        ("train.samples_per_prompt",),
    ),
    Counterpart(
        (
            "ppo_mini_batch_size", "mini_batch_size", "global_batch_size", "train_global_batch_size",
            "num_mini_batches", "steps_per_generation", "num_steps_per_rollout",
        ),
        ("train.updates_per_step",),
        "number of updates per step",
    ),
    Counterpart(("ppo_epochs", "num_ppo_epochs", "num_iterations"), ("train.epochs_per_step",)),
    Counterpart(
        (
            "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu", "micro_batch_size", "micro_train_batch_size",
            "micro_rollout_batch_size", "train_micro_batch_size", "train_microbatch_size", "logprob_batch_size",
            "ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu", "max_tokens_per_gpu",
            "max_total_sequence_length", "max_length", "max_seq_length", "max_len",
        ),
        ("trainer.max_tokens_per_microbatch",),
        "in tokens, sequences are packed",
    ),
    Counterpart(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"),
        ("train.prompts_per_step", "trainer.max_tokens_per_microbatch"),
        "a step's prompts over all ranks; the number of microbatches follows",
    ),
    Counterpart(
        ("use_dynamic_bsz", "use_dynamic_batch_size", "use_remove_padding", "packing", "packing_samples",
         "sequence_packing", "dynamic_batching", "balance_batch", "balance_data", "padding_free"),
        note="sequences are always packed and balanced, up to trainer.max_tokens_per_microbatch",
    ),
    Counterpart(
        ("total_training_steps", "max_steps", "num_rollout", "max_num_steps", "max_train_steps", "total_steps"),
        ("train.steps",),
    ),
    Counterpart(("eval_only",), ("train.steps",), "0; or: megarl eval MODEL RECIPE"),
    Counterpart(
        ("total_epochs", "num_train_epochs", "max_num_epochs", "num_episodes", "num_epochs", "n_epochs", "num_epoch"),
        ("train.epochs",),
    ),
    Counterpart(("val_batch_size", "per_device_eval_batch_size"), ("rollout.max_concurrent_requests",)),
    # Algorithm
    Counterpart(("adv_estimator", "advantage_estimator", "use_leave_one_out_baseline", "adv.estimator"),
                ("algorithm.advantage",)),
    Counterpart(("algorithm.algo", "algo", "algorithm.name"), ("algorithm.preset",)),
    Counterpart(("lam", "lambd", "lamda", "gae.lambda"), ("algorithm.gae_lambda",), "of orpo: preference.beta"),
    Counterpart(
        ("norm_adv_by_std_in_grpo", "scale_rewards", "grpo_std_normalization", "normalize_rewards", "norm_var"),
        ("algorithm.normalize_by_std",),
    ),
    Counterpart(("whiten_rewards", "normalize_advantages", "advantage_norm", "global_norm"),
                ("algorithm.whiten_advantages",)),
    Counterpart(("loss_fn.type", "policy_loss.loss_mode", "loss_mode", "importance_sampling_level"),
                ("algorithm.policy_loss",)),
    Counterpart(
        ("loss_type",),
        ("algorithm.policy_loss", "algorithm.aggregation"),
        "of pairs of answers: preference.loss",
    ),
    Counterpart(
        ("epsilon", "clip_ratio", "eps_clip", "cliprange", "clip_eps", "clip_range", "actor.clip"),
        ("algorithm.clip_low", "algorithm.clip_high"),
        "Adam's epsilon is optimizer.epsilon",
    ),
    Counterpart(("epsilon_low", "clip_ratio_low", "eps_clip_low", "clip_eps_low", "ratio_clip_min"),
                ("algorithm.clip_low",)),
    Counterpart(("epsilon_high", "clip_ratio_high", "eps_clip_high", "clip_eps_high", "ratio_clip_max"),
                ("algorithm.clip_high",)),
    Counterpart(("eps_clip_low_high",), ("algorithm.clip_low", "algorithm.clip_high")),
    Counterpart(("clip_ratio_c", "eps_clip_c", "ratio_clip_c", "dual_clip_c"), ("algorithm.dual_clip",)),
    Counterpart(("delta",), ("algorithm.max_ratio",)),
    Counterpart(("skip_threshold",), ("algorithm.skip_ratio",)),
    Counterpart(("entropy_coeff", "entropy_coef", "entropy_loss_coef", "entropy.coef"),
                ("algorithm.entropy_coefficient",)),
    Counterpart(
        ("beta",), ("algorithm.kl_coefficient",), "of pairs of answers: preference.beta; Adam's: optimizer.betas"
    ),
    Counterpart(
        ("kl_coef", "kl_loss_coef", "init_kl_coef", "kl_coeff", "kl_ctrl.kl_coef", "reference_policy_kl_penalty",
         "kl_beta", "kl.coef"),
        ("algorithm.kl_coefficient",),
    ),
    Counterpart(
        ("use_kl_loss", "use_kl_in_reward"),
        ("algorithm.kl_placement", "algorithm.kl_coefficient"),
        "a coefficient above 0 switches it on",
    ),
    Counterpart(("kl.type",), ("algorithm.kl_placement",), "reward or loss, as there"),
    Counterpart(("kl_loss_type", "kl_penalty", "reference_policy_kl_type", "reward_estimator", "loss_estimator"),
                ("algorithm.kl_estimator",)),
    Counterpart(("target_kl", "kl_ctrl.target_kl"), ("algorithm.kl_target",)),
    Counterpart(("kl_ctrl.horizon", "horizon"), ("algorithm.kl_horizon",)),
    Counterpart(("loss_agg_mode", "token_level_loss", "loss_variation", "calculate_per_token_loss", "avg_level"),
                ("algorithm.aggregation",)),
    Counterpart(
        ("filter_groups", "filter_groups.enable", "filter_groups.metric", "use_dynamic_sampling",
         "dynamic_sampling_filter_path", "dynamic_filtering", "dynamic_filtering_reward_range",
         "filter_range"),
        ("algorithm.dynamic_sampling",),
    ),
    Counterpart(("filter_groups.max_num_gen_batches", "max_num_gen_batches", "dynamic_sampling_max_gen_batches"),
                ("algorithm.max_attempts",)),
    Counterpart(
        ("overlong_buffer", "overlong_buffer.len", "overlong_buffer.enable", "overlong_buffer_len", "cache_length",
         "soft_over_length_punishment", "overlong_buffer_length"),
        ("algorithm.overlong_buffer",),
        "in tokens",
    ),
    Counterpart(("overlong_buffer.penalty_factor", "overlong_buffer_penalty"), ("algorithm.overlong_penalty",)),
    Counterpart(("top_entropy_quantile",), ("algorithm.entropy_top_share",)),
    Counterpart(("multi_objective_aggregation",), ("algorithm.reward_order",)),
    Counterpart(("mask_truncated_completions", "filter_truncated_response", "overlong_filtering"),
                ("algorithm.mask_truncated",)),
    Counterpart(
        ("use_tis", "rollout_is", "vllm_importance_sampling_correction", "use_importance_sampling_correction",
         "enable_vllm_is_correction", "vllm_importance_sampling_mode", "rollout_rs"),
        ("algorithm.importance_sampling",),
    ),
    Counterpart(("tis_coef",), ("algorithm.importance_sampling", "algorithm.importance_sampling_high"),
                "tis, and its cap"),
    Counterpart(
        ("tis_imp_ratio_cap", "tis_clip", "rollout_is_threshold", "vllm_importance_sampling_cap",
         "truncated_importance_sampling_ratio"),
        ("algorithm.importance_sampling_high",),
    ),
    Counterpart(("vllm_importance_sampling_clip_max",), ("algorithm.importance_sampling_high",)),
    Counterpart(
        ("tis_clip_low", "vllm_importance_sampling_clip_min", "rollout_is_threshold_lower"),
        ("algorithm.importance_sampling_low",),
    ),
    Counterpart(("ptx_coef",), ("algorithm.ptx_coefficient",)),
    # Distillation
    Counterpart(
        ("teacher_model_name_or_path", "teacher_model", "teacher.model_name", "teacher_model.model_path",
         "opd_teacher_load"),
        ("distillation.teacher",),
        "of a source: mixture.NAME.distillation.teacher",
    ),
    Counterpart(("teacher_key", "teacher_tag_key"), ("mixture",), "each source names its teacher"),
    Counterpart(("use_opd", "distillation.enabled"), ("loop",), "distillation"),
    Counterpart(("distillation_loss.loss_mode", "kl_type"), ("distillation.divergence", "distillation.loss")),
    Counterpart(("use_policy_gradient",), ("distillation.loss",), "true is sampled_token"),
    Counterpart(("distillation_loss.topk", "topk_logits_k", "gkd_logits_topk"), ("distillation.top_k",)),
    Counterpart(("zero_outside_topk",), ("distillation.tail",), "tokens beyond the teacher's are one outcome more"),
    Counterpart(("loss_max_clamp",), ("distillation.max_log_ratio",), "of sampled_token"),
    Counterpart(("opd_type", "teacher_model_server"), note="teachers are on the run's ranks, with the policy"),
    Counterpart(
        ("opd_kl_coef", "distillation_loss_coef", "use_task_rewards"),
        note="loop: distillation learns from teachers alone; rewards are measured",
    ),
    Counterpart(
        ("lmbda", "seq_kd"),
        note="loop: distillation learns on the policy's samples, loop: sft on those of a teacher",
    ),
    Counterpart(("mixed_kl_weight",), note="distillation.divergence jsd lies between the two KLs"),
    # Engines on ranks of their own
    Counterpart(
        ("n_behind", "max_trajectory_age_steps", "max_head_offpolicyness", "async_level", "max_async_level",
         "max_off_policy_steps", "max_staleness_steps", "max_staleness"),
        ("rollout.max_staleness", "rollout.placement"),
        "in versions of the weights, with placement separate",
    ),
    Counterpart(
        ("staleness_threshold",),
        ("rollout.max_staleness", "rollout.placement"),
        "in versions of the weights, not a share of the samples; with placement separate",
    ),
    Counterpart(
        ("trigger_parameter_sync_step", "update_weights_interval"),
        ("rollout.sync_every",),
        "in steps n; rollout.max_staleness must be at least n - 1",
    ),
    Counterpart(
        ("recompute_kv_cache_after_weight_updates", "clear_cache", "flush_cache"),
        ("rollout.recompute_kv",),
        "of requests interrupted by a reshard; later ones never find old keys and values",
    ),
    Counterpart(("use_decoupled_loss",), ("algorithm.importance_sampling",), "with old_logprobs trainer"),
    # Critic and pairs
    Counterpart(("cliprange_value", "value_clip", "value_clip_range"), ("critic.clip",)),
    Counterpart(("critic_warmup", "freezing_actor_steps", "num_critic_only_steps"), ("critic.warmup_steps",)),
    Counterpart(
        ("critic_pretrain", "value_model_path", "critic.model.path", "critic_load", "critic.model_name",
         "critic_checkpoint_path"),
        ("critic.path",),
    ),
    Counterpart(("vf_coef", "value_loss_coef"), note="the critic has weights and an optimizer of its own"),
    Counterpart(("simpo_gamma", "gamma_beta_ratio"), ("preference.margin",)),
    Counterpart(("length_normalization",), ("preference.normalize_by_length",)),
    Counterpart(("disable_reference_model",), ("preference.loss",), "simpo and orpo load no reference model"),
    Counterpart(("ref_tp",), note="the reference has the trainer's parallel sizes"),
    Counterpart(("auto_weight",), ("preference.desirable_weight", "preference.undesirable_weight"), "set by hand"),
    # Optimizer
    Counterpart(("critic.optim.lr", "critic.optimizer.lr", "critic.lr", "critic_learning_rate", "critic_lr"),
                ("critic.optimizer.learning_rate",)),
    Counterpart(("lr", "optim.lr", "actor_learning_rate", "actor_lr", "max_lr"), ("optimizer.learning_rate",)),
    Counterpart(("min_lr", "lr_min", "min_lr_ratio", "lr_end"), ("optimizer.min_learning_rate",), "not a ratio"),
    Counterpart(("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "warmup_style"), ("optimizer.schedule",)),
    Counterpart(
        ("lr_warmup_steps", "lr_warmup_iters", "num_warmup_steps"),
        ("optimizer.warmup_steps",),
        "in optimizer steps",
    ),
    Counterpart(
        ("lr_warmup_steps_ratio", "lr_warmup_ratio", "lr_warmup_fraction"),
        ("optimizer.warmup_ratio",),
    ),
    Counterpart(("grad_clip", "max_grad_norm", "clip_grad", "max_norm", "gradient_clipping"),
                ("optimizer.clip_grad_norm",)),
    Counterpart(("adam_beta1", "adam_beta2", "adam_betas"), ("optimizer.betas",)),
    Counterpart(("adam_epsilon", "adam_eps", "eps"), ("optimizer.epsilon",)),
    Counterpart(("l2",), ("optimizer.weight_decay",)),
    # Sampling and engine
    Counterpart(
        ("max_response_length", "max_completion_length", "rollout_max_response_len", "generate_max_len",
         "max_generation_length", "response_length", "max_seq_len", "train_sampling_params.max_new_tokens"),
        ("rollout.sampling.max_new_tokens",),
    ),
    Counterpart(("train_sampling_params",), ("rollout.sampling",)),
    Counterpart(("train_sampling_params.temperature",), ("rollout.sampling.temperature",)),
    Counterpart(("train_sampling_params.top_p",), ("rollout.sampling.top_p",)),
    Counterpart(("train_sampling_params.top_k",), ("rollout.sampling.top_k",)),
    Counterpart(
        ("test_sampling_params", "test_sampling_params.temperature", "test_sampling_params.max_new_tokens",
         "test_sampling_params.top_p", "test_sampling_params.top_k"),
        ("evaluation.sampling",),
    ),
    Counterpart(("env_path", "agentic_type"), ("rollout.environment",), "a name, or path/to/file.py:function"),
    Counterpart(("custom_tools",), ("rollout.environment",), "an environment has its tools"),
    Counterpart(("rollout_temperature",), ("rollout.sampling.temperature",)),
    Counterpart(
        ("temp_scheduler", "temp_scheduler.type", "temperature_anneal"),
        ("rollout.sampling.temperature_schedule",),
    ),
    Counterpart(("temp_scheduler.start_temperature",), ("rollout.sampling.temperature",)),
    Counterpart(("temp_scheduler.end_temperature",), ("rollout.sampling.end_temperature",)),
    Counterpart(("temp_scheduler.total_steps",), ("rollout.sampling.temperature_steps",)),
    Counterpart(("rollout_top_p",), ("rollout.sampling.top_p",)),
    Counterpart(("rollout_top_k",), ("rollout.sampling.top_k",)),
    Counterpart(("rollout_min_p",), ("rollout.sampling.min_p",)),
    Counterpart(
        ("rollout.sampling.repetition_penalty", "rollout.sampling.frequency_penalty",
         "rollout.sampling.presence_penalty"),
        note="the trainer could not repeat a distribution depending on earlier tokens; for evaluations use "
        "evaluation.sampling.repetition_penalty",
    ),
    Counterpart(("repetition_penalty",), ("evaluation.sampling.repetition_penalty",),
                "in evaluations only: the trainer could not repeat a distribution depending on earlier tokens"),
    Counterpart(("rollout_stop", "stop_strings"), ("rollout.sampling.stop",)),
    Counterpart(("rollout_stop_token_ids",), ("rollout.sampling.stop_token_ids",)),
    Counterpart(("val_kwargs", "eval_temperature", "val_kwargs.temperature"), ("evaluation.sampling",)),
    Counterpart(
        ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
        ("rollout.gpu_memory_utilization",),
        "or rollout.kv_cache_gib, the KV cache's size",
    ),
    Counterpart(
        ("sglang_mem_fraction_static", "mem_fraction_static"), ("rollout.kv_cache_gib",), "the KV cache's size in GiB"
    ),
    Counterpart(
        ("rollout.tensor_model_parallel_size", "vllm_tensor_parallel_size", "rollout_num_gpus_per_engine",
         "vllm_cfg.tensor_parallel_size", "rollout.tensor_parallel_size", "vllm_num_engines",
         "producer_tensor_parallel_size", "rollout.tp_size"),
        ("rollout.tp",),
    ),
    Counterpart(("producer_data_parallel_size",),
                note="the number of engines follows from rollout.tp and the sampling ranks"),
    Counterpart(("max_num_seqs", "sglang_server_concurrency"), ("rollout.max_concurrent_requests",)),
    Counterpart(("inference_microbatch_size",), ("rollout.max_concurrent_requests",), "imbs * num_generations"),
    Counterpart(
        ("enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching",
         "max_model_len", "engine_kwargs"),
        ("rollout.vllm",),
        "by vLLM's own names",
    ),
    Counterpart(("quantization", "vllm_cfg.precision"), ("rollout.quantization",), "fp8, of a bfloat16 model"),
    Counterpart(("kv_cache_dtype",), ("rollout.kv_cache_dtype",)),
    Counterpart(
        ("use_vllm", "backend", "rollout.name", "free_cache_engine", "vllm_enable_sleep", "enable_sleep_mode"),
        note="vLLM samples; on ranks shared with the trainer it sleeps during training",
    ),
    Counterpart(
        ("vllm_mode", "colocate", "colocate_all_models", "colocate_all"),
        ("rollout.placement",),
        "colocated or separate",
    ),
    Counterpart(
        ("num_inferencer", "rollout_num_gpus"),
        ("rollout.ranks",),
        "ranks of their own, with rollout.placement separate",
    ),
    # Trainer
    Counterpart(
        ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
        ("trainer.tp", "rollout.tp"),
        "of the trainer and of each engine",
    ),
    Counterpart(
        ("megatron.tensor_model_parallel_size", "megatron_cfg.tensor_model_parallel_size", "actor.tp_size",
         "critic.tp_size"),
        ("trainer.tp",),
    ),
    Counterpart(("enable_sequence_parallelism",), ("trainer.sequence_parallel",)),
    Counterpart(("sp_mode",), note="trainer.cp splits sequences in zigzag order"),
    Counterpart(("ddp_size", "fsdp_size"), note="the data-parallel size is the ranks over trainer.tp, pp and cp"),
    Counterpart(("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"), ("trainer.pp",)),
    Counterpart(("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"), ("trainer.vpp",)),
    Counterpart(("context_parallel_size", "ulysses_sequence_parallel_size", "ring_attn_size", "cp_size",
                 "sp_size"),
                ("trainer.cp",)),
    Counterpart(("expert_model_parallel_size", "expert_parallel_size", "ep_size"), ("trainer.ep",)),
    Counterpart(("expert_tensor_parallel_size",), ("trainer.etp",)),
    Counterpart(
        ("gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing",
         "recompute_granularity", "grad_checkpoint"),
        ("trainer.recompute",),
    ),
    Counterpart(
        ("param_offload", "optimizer_offload", "grad_offload", "adam_offload", "offload_optimizer", "offload_train",
         "offload_model"),
        ("trainer.offload",),
    ),
    Counterpart(
        ("optimizer_offload_fraction", "optimizer_cpu_offload", "hybrid_optimizer_offload_fraction",
         "zero_cpu_offload"),
        ("trainer.optimizer_offload_fraction",),
        "above 0, Adam steps on the CPU; trainer.offload moves states to the host while the engine samples",
    ),
    Counterpart(
        ("overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"),
        ("trainer.optimizer_offload_fraction",),
        "copies to and from the host overlap in any case; main weights and moments are float32",
    ),
    Counterpart(("use_distributed_optimizer",), ("trainer.distributed_optimizer",)),
    Counterpart(("overlap_grad_reduce",), ("trainer.overlap_grad_reduce",)),
    Counterpart(
        ("fp8_recipe", "fp8_cfg", "fp8_cfg.enabled", "fp8_format", "fp8"),
        ("trainer.fp8",),
        "blockwise; other recipes by Megatron's own names, trainer.megatron.fp8 and fp8_recipe",
    ),
    Counterpart(
        ("overlap_param_gather",),
        note="weights are gathered at the end of each update: the engine needs them before the next forward pass",
    ),
    Counterpart(
        ("moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend", "enable_deepep"),
        ("trainer.moe_dispatcher",),
        "flex is DeepEP",
    ),
    Counterpart(("override_transformer_config", "tf_config"), ("trainer.megatron",)),
    Counterpart(("use_rollout_routing_replay", "enable_rollout_routing_replay"), ("trainer.router_replay",)),
    Counterpart(("zero_stage", "fsdp_config", "fsdp", "deepspeed", "strategy", "plugin"),
                note="Megatron-Core trains; see trainer.tp, trainer.pp and trainer.distributed_optimizer"),
    Counterpart(("lora_rank", "lora_r", "lora_dim"), ("lora.rank",)),
    Counterpart(("lora_alpha",), ("lora.alpha",)),
    Counterpart(("lora_dropout", "linear_lora_dropout"), ("lora.dropout",)),
    Counterpart(("lora_config",), ("lora.rank", "lora.alpha", "lora.dropout", "lora.targets")),
    Counterpart(("embedding_lora_dropout", "lora_train_bias", "lora_initialization_method"),
                note="adapters are on lora.targets only, have no biases and are initialised as in LoRA's paper"),
    Counterpart(("lora_target_modules", "target_modules"), ("lora.targets",)),
    # Rewards
    Counterpart(
        ("reward_funcs", "reward_type", "rm_type", "custom_rm_path", "remote_rm_url", "custom_reward_function",
         "custom_reward_function.path", "custom_reward_function.name", "reward_manager", "reward_functions",
         "response_format_tags"),
        ("reward.functions",),
        "names, or package.module:function",
    ),
    Counterpart(("no_neural_reward_model",), ("reward.model",), "left out, the default"),
    Counterpart(
        ("reward_pretrain", "reward_model_path", "reward_model.model.path", "reward_model_name_or_path", "rm_pretrain",
         "rm_checkpoint_path"),
        ("reward.model",),
    ),
    Counterpart(
        ("reward_weights", "reward.weights", "reward.weight"),
        ("reward.functions", "reward.function_weight", "reward.model_weight"),
        "[{name: NAME, weight: 2}], and the weights of functions and model",
    ),
    Counterpart(("reward_clip_range",), ("reward.model_clip",)),
    Counterpart(("sandbox_fusion.url", "sandbox_fusion_url", "sandbox_url", "code_verifier_api_url"), ("sandbox.url",)),
    Counterpart(("sandbox_fusion.memory_limit_mb",), ("sandbox.memory_mib",)),
    # Machines and files
    Counterpart(
        ("n_gpus_per_node", "gpus_per_node", "actor_num_gpus_per_node", "num_gpus_per_node"),
        ("cluster.ranks_per_node",),
    ),
    Counterpart(("nnodes", "num_nodes", "actor_num_nodes"), ("cluster.nodes",)),
    Counterpart(("num_trainers",), ("cluster.ranks_per_node",), "all ranks, rollout.ranks of them for sampling only"),
    Counterpart(("experiment_name", "run_name", "exp_name"), ("name",)),
    Counterpart(("project", "project_name", "wandb_project"), ("name",),
                "of the run and its folder; the variable WANDB_PROJECT names a project"),
    Counterpart(("master_address",), ("cluster.launcher", "cluster.ray_address"), "the address of a Ray cluster"),
    Counterpart(("master_port", "ray_dir"), note="the launcher chooses ports and folders"),
    Counterpart(("output_dir", "default_local_dir", "checkpoint_dir", "ckpt_path", "save_path", "save_dir"),
                ("runs_folder",)),
    Counterpart(("save_freq", "save_interval", "save_steps", "save_period"), ("checkpoint.every_steps",)),
    Counterpart(("max_actor_ckpt_to_keep", "save_total_limit", "keep_top_k", "max_ckpt_num"), ("checkpoint.keep",)),
    Counterpart(("save_hf", "save_hf_interval", "save_hf_ckpt"), ("checkpoint.export_every_steps",)),
    Counterpart(("async_save",), ("checkpoint.asynchronous",)),
    Counterpart(("test_freq", "eval_interval", "eval_steps", "val_period"), ("evaluation.every_steps",)),
    Counterpart(("max_val_samples",), ("evaluation.max_problems",)),
    Counterpart(
        ("val_kwargs.n", "n_samples_per_eval_prompt", "eval_n_samples_per_prompt"), ("evaluation.samples_per_prompt",)
    ),
    Counterpart(("val_before_train", "val_at_start", "eval_on_start"), ("evaluation.at_start",)),
    Counterpart(("save_optimizer",), note="a checkpoint always has the optimizer's state"),
    Counterpart(("resume_mode", "resume_from_checkpoint", "load_checkpoint", "checkpoint_path", "load_ckpt_from",
                 "optimizer_dir"),
                note="a run goes on with: megarl train RECIPE --resume"),
    Counterpart(("global_profiler.steps", "profile_steps", "profile_step_start", "enable_profiling"),
                ("train.profile_steps",)),
    Counterpart(("log_completions", "rollout_data_dir", "log_val_generations", "rollout_save_dir"),
                ("samples_every_steps",)),
    Counterpart(("eval_save_dir",), note="samples of evaluations are in samples/ of the run's folder"),
    Counterpart(
        ("logger", "report_to", "use_wandb", "disable_wandb", "use_tensorboard", "log_dir"),
        ("trackers",),
        "tensorboard, wandb, mlflow; metrics.jsonl is always written",
    ),
    Counterpart(("logging_steps",), note="every step is logged"),
    Counterpart(("data_actor_buffer_size_limit",), ("rollout.max_staleness",),
                "it limits how far engines sample ahead"),
    Counterpart(("freeze_steps",), ("critic.warmup_steps",)),
)  # fmt: skip
"""One entry per meaning."""

_BY_NAME = {name: entry for entry in COUNTERPARTS for name in entry.names}
