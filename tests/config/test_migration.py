from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import typer.main

from megarl.cli import app
from megarl.config import Recipe
from megarl.config.hints.foreign import VALUES
from megarl.config.hints.migration import meanings, migration_page, options
from megarl.config.hints.value_hints import nearest_value
from tests.config.refusals import faults

CLIP = "algorithm.clip_low and algorithm.clip_high"
MICROBATCH = "trainer.max_tokens_per_microbatch"

# As the other programs write them, under a section of theirs or of a recipe.
WRITTEN = {
    # verl
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "train.samples_per_prompt",
    "actor_rollout_ref.model.override_config.rope_theta": "model.override_config",
    "rollout.n": "train.samples_per_prompt",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "trainer.tp",
    "tensor_model_parallel_size": "trainer.tp and rollout.tp",
    "actor_rollout_ref.actor.optim.lr": "optimizer.learning_rate",
    "critic.optim.lr": "critic.optimizer.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train.updates_per_step",
    "actor_rollout_ref.actor.ppo_epochs": "train.epochs_per_step",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MICROBATCH,
    "actor_rollout_ref.actor.clip_ratio": CLIP,
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coefficient",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.grad_clip": "optimizer.clip_grad_norm",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coefficient",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_by_std",
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.prompt_key": "data.fields",
    "data.filter_overlong_prompts": "data.overlong",
    "data.train_batch_size": "train.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.sampling.max_new_tokens",
    "trainer.n_gpus_per_node": "cluster.ranks_per_node",
    "trainer.nnodes": "cluster.nodes",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.test_freq": "evaluation.every_steps",
    "trainer.total_epochs": "train.epochs",
    "return_raw_chat": "model.chat_template",
    "repetition_penalty": "evaluation.sampling.repetition_penalty",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "trainer.total_training_steps": "train.steps",
    "trainer.experiment_name": "name",
    "trainer.logger": "trackers",
    "report_to": "trackers",
    "custom_reward_function.path": "reward.functions",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",
    "reward_model.sandbox_fusion.url": "sandbox.url",
    "reward_model.sandbox_fusion.memory_limit_mb": "sandbox.memory_mib",
    "distillation.teacher_models.teacher_model.model_path": "distillation.teacher",
    "distillation.distillation_loss.loss_mode": "distillation.divergence and distillation.loss",
    "distillation.distillation_loss.topk": "distillation.top_k",
    "teacher_model_name_or_path": "distillation.teacher and distillation.loss",
    "distillation.topk_logits_k": "distillation.top_k",
    "distillation.distillation_loss.use_task_rewards": "distillation.use_task_rewards",
    "opd_kl_coef": "distillation.kl_coefficient",
    # TRL
    "num_ppo_epochs": "train.epochs_per_step",
    "num_iterations": "train.epochs_per_step",
    "algorithm.epsilon": CLIP,
    "algorithm.epsilon_high": "algorithm.clip_high",
    "algorithm.beta": "algorithm.kl_coefficient",
    "optimizer.lr": "optimizer.learning_rate",
    "train.num_generations": "train.samples_per_prompt",
    "train.per_device_train_batch_size": f"train.prompts_per_step and {MICROBATCH}",
    "train.max_completion_length": "rollout.sampling.max_new_tokens",
    "train.max_steps": "train.steps",
    "train.num_iterations": "train.epochs_per_step",
    "train.top_entropy_quantile": "algorithm.entropy_top_share",
    "train.multi_objective_aggregation": "algorithm.reward_order",
    "train.sync_ref_model": "algorithm.reference_update_steps",
    "train.ref_model_mixup_alpha": "algorithm.reference_mixing",
    "train.scale_rewards": "algorithm.normalize_by_std",
    "optimizer.max_grad_norm": "optimizer.clip_grad_norm",
    "optimizer.adam_beta2": "optimizer.betas",
    "train.gradient_checkpointing": "trainer.recompute",
    "reward.reward_funcs": "reward.functions",
    "lora.lora_r": "lora.rank",
    # slime
    "rollout-batch-size": "train.prompts_per_step",
    "n-samples-per-prompt": "train.samples_per_prompt",
    "n_samples_per_prompt": "train.samples_per_prompt",
    "global-batch-size": "train.updates_per_step",
    "eps-clip": CLIP,
    "eps_clip": CLIP,
    "eps-clip-high": "algorithm.clip_high",
    "rollout-max-response-len": "rollout.sampling.max_new_tokens",
    "max-tokens-per-gpu": MICROBATCH,
    "use-tis": "algorithm.importance_sampling",
    "hf-checkpoint": "model.path",
    "rm-type": "reward.functions",
    "num-rollout": "train.steps",
    # NeMo-RL
    "grpo.num_prompts_per_step": "train.prompts_per_step",
    "grpo.num_generations_per_prompt": "train.samples_per_prompt",
    "grpo.max_num_steps": "train.steps",
    "grpo.val_period": "evaluation.every_steps",
    "loss_fn.reference_policy_kl_penalty": "algorithm.kl_coefficient",
    "loss_fn.ratio_clip_min": "algorithm.clip_low",
    "policy.train_global_batch_size": "train.updates_per_step",
    "policy.generation.vllm_cfg.tensor_parallel_size": "rollout.tp",
    "policy.megatron_cfg.pipeline_model_parallel_size": "trainer.pp",
    "cluster.gpus_per_node": "cluster.ranks_per_node",
    # OpenRLHF
    "kl_coef": "algorithm.kl_coefficient",
    "init_kl_coef": "algorithm.kl_coefficient",
    "clip_ratio": CLIP,
    "actor_learning_rate": "optimizer.learning_rate",
    "critic_learning_rate": "critic.optimizer.learning_rate",
    "generate_max_len": "rollout.sampling.max_new_tokens",
    "micro_train_batch_size": MICROBATCH,
    "dynamic_filtering": "algorithm.dynamic_sampling",
    "pretrain": "model.path",
    "ptx_coef": "algorithm.ptx_coefficient",
    # ColossalRL
    "inference_batch_size": "train.prompts_per_step",
    "train.batch_size": "train.prompts_per_step",
    "clip_eps_low": "algorithm.clip_low",
    "loss_variation": "algorithm.aggregation",
    "skip_threshold": "algorithm.skip_ratio",
    "filter_truncated_response": "algorithm.mask_truncated",
    "soft_over_length_punishment": "algorithm.overlong_buffer",
}

NONE = {
    "actor_rollout_ref.model.trust_remote_code": "never run",
    "use_vllm": "vLLM samples",
    "lmbda": "policy's samples",
    "zero_stage": "Megatron-Core trains",
    "rollout.sampling.repetition_penalty": "the trainer could not repeat",
    "resume_mode": "--resume",
    "actor_rollout_ref.model.use_remove_padding": "always packed",
}


def schema(section: type = Recipe, prefix: str = "") -> set[str]:
    names = set()
    for name, field in section.model_fields.items():
        names.add(prefix + name)
        if hasattr(field.annotation, "model_fields"):
            names |= schema(field.annotation, f"{prefix}{name}.")
    return names


def test_every_counterpart_is_a_field_or_says_why_not() -> None:
    fields = schema()
    for option in options():
        assert set(option.fields) <= fields
        assert option.fields or (option.note and not option.assignments)


def test_each_name_has_one_meaning_in_a_program_and_none_is_a_field_itself() -> None:
    names = Counter((option.program, name, option.value) for option in options() for name in option.names)
    assert len(names) >= 400
    assert [name for name, count in names.items() if count > 1] == []
    plain = {name for _, name, _ in names}
    # A section's name is unknown as an option only.
    assert plain & schema() == {"model"}
    assert all(meanings(f"any.section.{name}") for name in plain)


def test_a_short_option_is_written_once_in_a_program() -> None:
    shorts = Counter(
        (option.program, spelling, option.value)
        for option in options()
        for spelling in option.spellings
        if spelling.startswith("-") and not spelling.startswith("--")
    )
    assert len(shorts) > 30 and max(shorts.values()) == 1


def test_other_programs_values_are_a_fields_own() -> None:
    for field, translations in VALUES.items():
        for value, spellings in translations.items():
            assert {nearest_value(field, spelling) for spelling in spellings.split()} == {value}, field


def test_the_committed_page_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    typer.main.get_command(app).main(["show-config", "--migration"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed == migration_page() and not re.search(r"^\{\w+\}$", printed, re.MULTILINE)
    committed = (Path(__file__).resolve().parents[2] / "launch/recipes/MIGRATION.md").read_text(encoding="utf-8")
    assert committed == printed, "run: megarl show-config --migration > launch/recipes/MIGRATION.md"


def test_what_other_programs_write_is_answered_with_the_field(small: Path) -> None:
    lines = faults(small, *(f"{name}=1" for name in WRITTEN))
    answers = dict(line.strip().split(" = 1: unknown key; ", 1) for line in lines)
    assert answers.keys() == WRITTEN.keys()
    wrong = {
        name: (hint, WRITTEN[name])
        for name, hint in answers.items()
        if hint.partition(" (")[0] != f"here it is {WRITTEN[name]}"
    }
    assert wrong == {}


def test_what_has_no_counterpart_says_why(small: Path) -> None:
    lines = faults(small, *(f"{name}=1" for name in NONE))
    assert len(lines) == len(NONE)
    for name, words in NONE.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} = 1: ")]
        assert "has no counterpart: " in line and words in line


def test_a_section_of_this_program_that_is_misspelt_stays_one_line(small: Path) -> None:
    (line,) = faults(small, "rewrd.functions=[boxed]")
    assert line == "  rewrd = {'functions': ['boxed']}: unknown key; did you mean reward?"
