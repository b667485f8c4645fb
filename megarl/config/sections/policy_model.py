"""Recipe section `model`: the policy model, its folder, type and overrides."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
)
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Decides
from megarl.config.override import override_fault
from megarl.config.section import Section
from megarl.files.model_folder import find_folder


def _overrides(overrides: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if fault := override_fault(overrides):
        raise PydanticCustomError("override_config", "{fault}", {"fault": fault})
    return overrides


OverrideConfig = Annotated[dict[str, JsonValue], AfterValidator(_overrides)]


class ModelConfig(Section):
    """Policy model: its folder, data type, overrides and chat template."""

    path: Annotated[str, Decides(vllm="model")]
    """Folder of the initial Hugging Face model (config.json, safetensors, tokenizer), or its name OWNER/NAME on the
    Hub. A start downloads it if the Hub's cache lacks it. For machines without network: `hf download OWNER/NAME`."""
    dtype: Annotated[
        Literal["float32", "bfloat16"], Decides(vllm="dtype", megatron="params_dtype pipeline_dtype bf16")
    ] = "bfloat16"
    """Data type of weights and matrix products, in trainer and engines. Default: bfloat16."""
    override_config: Annotated[OverrideConfig, Decides(vllm="hf_overrides")] = Field(default_factory=dict)
    """Replacements for fields of the policy's config.json, in trainer, engines and exported model: rope_theta,
    rope_scaling or rope_parameters, max_position_embeddings, rms_norm_eps, num_experts_per_tok, norm_topk_prob. Critic
    and reward model keep their values."""
    chat_template: str | None = None
    """Jinja file with a chat template that replaces the tokenizer's. `plain`: only the messages' texts, as for base
    models, with the end-of-sequence token after an assistant's message. The exported model gets this template."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of variables in the chat template, for example {enable_thinking: false} for Qwen3, wherever the template
    is used. The exported model's template has them as defaults."""

    @property
    def folder(self) -> str:
        return find_folder(self.path)
