"""Log-probs of the same model folder as computed by transformers, on this host's CPU, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.config.override import apply_override
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import completed_config, read_model_shape
from megarl.files.model_folder import read_object
from megarl.platform.memory.host_memory import available_bytes

_LARGEST_BYTES = 16 << 30
"""Maximum bytes of a model. Larger models take minutes to load."""
_SHARE = 0.5
"""Maximum share of the available host memory for the model."""


def transformers_logprobs(
    folder: str, override: Mapping[str, Any], sequences: Sequence[NDArray[np.int64]], dtype: torch.dtype
) -> list[NDArray[np.float32]] | str:
    """Return the log-prob of each token in nats, float32 [tokens] per sequence, the first of each 0.

    Returns a reason instead if transformers cannot compute them. `sequences` are token ids [tokens]. `override` changes
    fields of config.json (`config.override`).
    """
    if (problem := _memory_problem(folder, override, dtype)) is not None:
        return problem
    # transformers refuses some models that megarl reads, for example a quantised format or a model_type of vLLM's own.
    # Their training must not depend on it.
    try:
        with torch.random.fork_rng(), torch.no_grad():
            model = _load_model(folder, override, dtype)
            return [_logprobs(model, torch.from_numpy(tokens)) for tokens in sequences]
    except Exception as error:
        return f"transformers cannot compute this model ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _memory_problem(folder: str, override: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    """Return why the model does not fit into host memory; None: it fits."""
    num_bytes = dtype.itemsize * sum(map(prod, hf_tensors(read_model_shape(folder, override)).values()))
    limit_bytes = min(_LARGEST_BYTES, int(_SHARE * available_bytes()))
    if num_bytes <= limit_bytes:
        return None
    return (
        f"the model needs {num_bytes / 2**30:.1f} GiB of host memory, but at most {limit_bytes / 2**30:.1f} GiB may be "
        "used for the comparison"
    )


def _load_model(folder: str, override: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = completed_config(read_object(Path(folder) / "config.json"), Path(folder))
    changed_fields = apply_override(fields, override)
    config = AutoConfig.for_model(**changed_fields) if override else AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, trust_remote_code=False).eval()


def _logprobs(model: Any, tokens: torch.Tensor) -> NDArray[np.float32]:
    logits = model(tokens[None], use_cache=False).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), logprobs.numpy()])
