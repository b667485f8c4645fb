"""Checks of settings that vLLM would reject only after its start: head size, KV cache, stop tokens, drafters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.config.sections.rollout import MODEL_LAYERS
from megarl.families.eagle3 import drafter_faults, drafter_folder
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape
from megarl.files.model_folder import find_folder
from megarl.planner.cache import block_tokens, gib_text, sequence_cache_bytes
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight.libraries.library_fields import supported_head_sizes
from megarl.preflight.model.draft_layers import model_drafter_faults
from megarl.preflight.registry import checks
from megarl.types import DataError


@checks("rollout")
def check_engine_fit(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the errors of the engine: head size, KV cache, stop tokens, drafter and scheduling."""
    if not recipe.has_engine:
        return
    yield from _find_head_size_faults(recipe, shape)
    yield from _find_cache_faults(recipe, shape)
    yield from _find_stop_token_faults(recipe, shape)
    yield from _find_drafter_faults(recipe, shape)
    if recipe.rollout.async_scheduling and runs_on_cpu():
        yield (
            "rollout.async_scheduling = True: vLLM has no asynchronous scheduling on a CPU; leave it out, so that "
            "vLLM decides"
        )


HOST_DRAFTERS = ("ngram", "suffix", "custom_class")
"""vLLM's speculative-decoding methods that draft on the host, and so wait for the results of the previous step."""
# ngram_gpu drafts on the GPU, so it allows asynchronous scheduling. None of these methods has model weights.
_WEIGHTLESS = (*HOST_DRAFTERS, "ngram_gpu")
_CPU_LATENT_CHANNELS = 576  # The kernel of vLLM 0.30 is compiled for DeepSeek-V3's 512 + 64 channels.


def _find_drafter_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of `speculative_config`: draft models and methods unsupported by megarl's engines."""
    config = recipe.rollout.vllm.get("speculative_config")
    if not isinstance(config, Mapping) or not config:
        return
    method = config.get("method") or _derive_method(config.get("model"))
    field = f"rollout.vllm.speculative_config = {dict(config)}"
    if method == MODEL_LAYERS:
        yield from model_drafter_faults(recipe, field)
    elif (folder := drafter_folder(config)) is not None:
        yield from _find_published_drafter_faults(recipe, shape, field, folder)
    elif method not in _WEIGHTLESS:
        # megarl's vLLM initialises all weights randomly, and a reshard writes only the policy's weights.
        kind = f"an {method} drafter's" if method and method.startswith("eagle") else "the draft model's"
        model_layers = "" if shape.draft_layers_problem else f" or to {MODEL_LAYERS}"
        yield (
            f"{field}: {kind} own weights would stay random, because a reshard writes only the policy's; set the "
            f"method to {either(_WEIGHTLESS)}{model_layers}, or leave it out"
        )
    elif runs_on_cpu() and method == "ngram_gpu":
        yield f"{field}: ngram_gpu drafts on a GPU, and this machine has none; take ngram"
    if recipe.trainer.router_replay:
        yield (
            f"{field}: with trainer.router_replay the engine records the experts of each token, which is not proved "
            "for rejected drafts; leave one of them out"
        )
    if method == "suffix" and find_spec("arctic_inference") is None:
        yield f"{field}: vLLM's method suffix needs the package arctic-inference, which is not installed; use ngram"
    if recipe.rollout.async_scheduling and method in HOST_DRAFTERS:
        yield (
            f"rollout.async_scheduling = True: the draft method {method} runs on the host between engine steps, so no "
            "step can start early; leave it out, or use ngram_gpu (rollout.vllm.speculative_config)"
        )


def _find_published_drafter_faults(recipe: Recipe, shape: ModelShape, field: str, model: str) -> Iterator[str]:
    """Yield errors of an EAGLE-3 drafter in a separate folder."""
    settings = recipe.rollout.vllm["speculative_config"]
    for name in ("draft_load_config", "quantization", "parallel_drafting"):
        if settings.get(name):
            yield f"{field}: {name} is not proved with a drafter of its own files; leave it out"
    if recipe.model.override_config:
        # vLLM 0.30 passes changed fields of config.json to the policy's model only.
        yield f"{field}: not proved with model.override_config; edit config.json instead, or take ngram"
    if recipe.rollout.quantization != "none":
        yield (
            f"{field}: not proved with rollout.quantization = {recipe.rollout.quantization}; set rollout.quantization="
            "none, or take ngram"
        )
    try:
        faults = list(drafter_faults(find_folder(model), shape))
    except (DataError, OSError) as error:
        faults = [str(error)]
    for fault in faults:
        yield f"{field}: {fault}; give a published EAGLE-3 drafter of this policy, or take ngram"


def _derive_method(model: object) -> str | None:
    """Return the speculative method that vLLM 0.30 derives from a draft model's name, or None."""
    if model in ("ngram", "[ngram]"):
        return "ngram"
    # vLLM 0.30 takes a dotted import path for a custom drafter class.
    name_parts = model.split(".") if isinstance(model, str) else []
    is_class = len(name_parts) > 1 and all(part.isidentifier() for part in name_parts)
    return "custom_class" if is_class else None


def _find_head_size_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error if vLLM's attention on CPUs has no kernel for the size of the model's heads."""
    if isinstance(shape.attention, Latent):
        cached_channels = shape.attention.cached_numbers(tp=1)
        if runs_on_cpu() and cached_channels != _CPU_LATENT_CHANNELS:
            yield (
                f"model.path = {recipe.model.path}: kv_lora_rank + qk_rope_head_dim = {cached_channels}, vLLM's latent "
                f"attention on CPU takes {_CPU_LATENT_CHANNELS}; take another model, or a machine with GPUs"
            )
        return
    sizes = supported_head_sizes() if runs_on_cpu() else []
    if sizes and shape.head_dim not in sizes:
        yield (
            f"model.path = {recipe.model.path}: its attention heads have {shape.head_dim} channels, but vLLM's "
            f"attention on CPUs supports {', '.join(map(str, sizes))}; use another model, or GPUs"
        )


def _find_cache_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error if the KV cache of the recipe cannot hold one sequence of the largest length."""
    rollout = recipe.rollout
    # With gpu_memory_utilization, vLLM sizes the cache itself. `preflight.memory.memory_fit` checks that case.
    if rollout.gpu_memory_utilization is not None or (tokens_per_block := block_tokens(recipe)) is None:
        return
    new_tokens = max(rollout.sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
    longest_sequence = recipe.data.max_prompt_tokens + new_tokens
    needed_cache_bytes = sequence_cache_bytes(recipe, shape, block_tokens=tokens_per_block, tokens=longest_sequence)
    if needed_cache_bytes > rollout.kv_cache_gib * 2**30:
        block_bytes = sequence_cache_bytes(recipe, shape, block_tokens=tokens_per_block, tokens=0)
        # vLLM reserves one block, so do not count it.
        cached_tokens = max(0, int(rollout.kv_cache_gib * 2**30 / block_bytes) - 1) * tokens_per_block
        yield (
            f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g}: holds {cached_tokens} tokens on a rank, but one "
            "sequence of "
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + max_new_tokens {new_tokens} has "
            f"{longest_sequence}; use at least {gib_text(needed_cache_bytes)}, or lower these limits"
        )


def _find_stop_token_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error for each stop token id outside the vocabulary: vLLM accepts it and never samples it."""
    stop_tokens = {
        "rollout.sampling": recipe.rollout.sampling.stop_token_ids,
        "evaluation.sampling": recipe.evaluation.sampling.stop_token_ids or (),
    }
    for field, token_ids in stop_tokens.items():
        if unknown_tokens := [token_id for token_id in token_ids if token_id >= shape.vocab_size]:
            yield (
                f"{field}.stop_token_ids = {list(token_ids)}: the model's vocabulary of {shape.vocab_size} ends before "
                f"{unknown_tokens[0]}; give ids of its tokenizer"
            )
