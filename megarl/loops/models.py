"""The models on a run's ranks, and calls that change them apart from updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from megarl.algorithms.policy_losses import POLICY_LOSSES, is_sequence_loss
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.rank_model import RankModel
from megarl.cluster.shared_prefixes import SharedPrefixes
from megarl.cluster.teacher_model import TeacherRankModel
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.import_path import function_of
from megarl.planner.sizes import parallel_of, row_multiple
from megarl.platform import transformer_engine
from megarl.platform.spans import span
from megarl.rollout.state import RLState
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.spikes import SpikeDetector

METRICS = (
    MetricRow(
        "rollout/routed_experts_bytes",
        "bytes",
        "size of the routed experts held by the ranks",
        condition="trainer.router_replay",
    ),
    MetricRow(
        "kl/reference_moved", "count", "1 in steps moving the reference", condition="algorithm.reference_update_steps"
    ),
)

_SAMPLE_SETTINGS = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
)
"""Megatron-Core's settings by which training computes equal tokens after equal prefixes differently."""


def trained_shape(recipe: Recipe, shape: ModelShape) -> ModelShape:
    """Return the shape of the trained model: that of model.path with a value head or trained draft layers."""
    if recipe.loop == "reward_model":
        return shape.with_value_head()
    return shape.with_draft_layers(recipe.trainer.trains_draft_layers)


def make_rank_models(
    recipe: Recipe, parallel: ParallelConfig, ranks: WorkerGroup, spikes: SpikeDetector | None = None
) -> dict[str, RankModel]:
    """Return the recipe's models by name: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on.

    `spikes` detects the policy's updates to drop.
    """
    policy_shape = _read_shape(recipe, recipe.model.folder)
    policy = RankModel(
        ranks,
        parallel,
        max_tokens_per_microbatch=recipe.trainer.max_tokens_per_microbatch,
        max_tokens_per_forward=recipe.trainer.max_tokens_per_forward,
        row_multiple=row_multiple(recipe),
        together=recipe.sequences_per_example,
        shape=trained_shape(recipe, policy_shape),
        # A backward pass costs two forward passes. With LoRA the base weights need no gradients, which saves one pass.
        update_passes=2.0 if recipe.lora.rank else 3.0,
    )
    models = {"policy": replace(policy, spikes=spikes)} | {
        name: replace(policy, name=name, shape=model_shape, update_passes=3.0)
        for name, model_shape in _read_other_shapes(recipe, policy_shape).items()
    }
    models |= _make_teachers(recipe, policy, policy_shape)
    # Some losses need all segments of a sample in one microbatch.
    if recipe.has_advantages:
        policy_loss = function_of(recipe.algorithm.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")
        keeps_samples = is_sequence_loss(policy_loss) or recipe.algorithm.off_policy_limit is not None
        models["policy"] = replace(models["policy"], keeps_samples=keeps_samples)
    if recipe.trainer.share_prefixes != "auto":
        return models
    return {
        name: replace(
            model,
            packing=SharedPrefixes(_find_sharing_problem(recipe, model, is_trained=name in ("policy", "critic"))),
        )
        for name, model in models.items()
    }


def _make_teachers(recipe: Recipe, policy: RankModel, policy_shape: ModelShape) -> dict[str, TeacherRankModel]:
    """Return the teachers by name. A teacher with the policy's weights has its parallel sizes too."""
    teacher_with_policy_sizes = TeacherRankModel(**{item.name: getattr(policy, item.name) for item in fields(policy)})
    teacher = teacher_with_policy_sizes
    if recipe.distillation.sizes:
        teacher_recipe = recipe.for_teachers
        teacher = replace(teacher, parallel=parallel_of(teacher_recipe), row_multiple=row_multiple(teacher_recipe))
    teachers: dict[str, TeacherRankModel] = {}
    for name in recipe.teacher_models:
        if (folder := recipe.teachers.get(name)) is None:
            teachers[name] = replace(teacher_with_policy_sizes, name=name, shape=policy_shape)
        else:
            teachers[name] = replace(teacher, name=name, shape=_read_shape(recipe, folder))
    return teachers


def _find_sharing_problem(recipe: Recipe, model: RankModel, *, is_trained: bool) -> str | None:
    """Return why this model cannot compute a prefix once for several sequences, or None."""
    if model.shape is not None and model.shape.linear_attention is not None:
        return "the model has linear attention, whose state follows one sequence"
    if model.shape is not None and isinstance(model.shape.attention, Latent) and transformer_engine.is_installed():
        return "the model has latent attention: Transformer Engine's rotary kernel counts positions from a row's start"
    if not is_trained:
        return None
    if (draft_layers_setting := recipe.trainer.draft_layers_setting) and model.name == "policy":
        return f"{draft_layers_setting}: a shared token has a different token after the next one in each sample"
    if recipe.trains_drafter and model.name == "policy":
        return "trainer.drafter_learning_rate: a shared token has a different next token in each sample"
    if recipe.lora.dropout and model.name == "policy":
        return f"lora.dropout = {recipe.lora.dropout}: each sample has dropout of its own"
    # Noise and dropped tokens depend on a token's place in its sequence.
    for name in _SAMPLE_SETTINGS:
        if value := recipe.trainer.megatron.get(name):
            return f"trainer.megatron.{name} = {value}: it treats equal tokens of two samples differently"
    return None


def sharing_notices(models: Mapping[str, RankModel]) -> list[str]:
    """Return a message for each reason why models share no prefixes. Empty if the recipe turns sharing off."""
    reasons: dict[str, list[str]] = {}
    for name, model in models.items():
        if isinstance(model.packing, SharedPrefixes) and model.packing.problem is not None:
            reasons.setdefault(model.packing.problem, []).append(name)
    return [
        f"trainer.share_prefixes has no effect on {', '.join(names)}: {reason}." for reason, names in reasons.items()
    ]


def _read_shape(recipe: Recipe, folder: str) -> ModelShape:
    return read_model_shape(folder, recipe.override_of(folder))


def _read_other_shapes(recipe: Recipe, shape: ModelShape) -> dict[str, ModelShape]:
    """Return the shapes of reference, critic and reward model by name. `shape` is the policy's."""
    shapes: dict[str, ModelShape] = {}
    if recipe.has_reference:
        shapes["reference"] = shape
    if recipe.has_critic:
        folder = recipe.further_models.get("critic.path", recipe.model.folder)
        shapes["critic"] = _read_shape(recipe, folder).with_value_head()
    if (reward_model := recipe.further_models.get("reward.model")) is not None:
        shapes["reward_model"] = _read_shape(recipe, reward_model)
    return shapes


async def move_reference(models: Mapping[str, RankModel], recipe: Recipe, step: int) -> dict[str, float]:
    """Move the reference towards the policy after a step's updates, if due. Return the metric `kl/reference_moved`."""
    interval = recipe.algorithm.reference_update_steps
    if interval is None or "reference" not in models:
        return {}
    is_due = step % interval == 0
    if is_due:
        await models["reference"].group.call("scoring_models.move_reference")
    return {"kl/reference_moved": float(is_due)}


async def load_experts(models: Mapping[str, RankModel], recipe: Recipe, state: RLState, checkpoint: Path) -> None:
    """Load the routed experts of waiting groups from a checkpoint into the ranks (trainer.router_replay)."""
    if recipe.trainer.router_replay:
        await models["policy"].group.call("replayed_experts.load", checkpoint, state.waiting_experts)


async def retain_experts(models: Mapping[str, RankModel], recipe: Recipe, state: RLState) -> dict[str, float]:
    """With router replay, drop the choices of experts stored on the ranks, except for groups waiting or in flight.

    Returns `rollout/routed_experts_bytes`, their size before.
    """
    if not recipe.trainer.router_replay:
        return {}
    with span("retain experts"):
        sizes = await models["policy"].group.call("replayed_experts.retain", state.waiting_experts)
    return {"rollout/routed_experts_bytes": float(sum(sizes))}


async def export(models: Mapping[str, RankModel], folder: RunFolder) -> None:
    """Export the trained model, and the critic if any. The engines must sleep."""
    await models["policy"].group.call("export", folder.model_folder)
    if "critic" in models:
        await models["critic"].group.call("export", folder.path / "hf_critic", "critic")
