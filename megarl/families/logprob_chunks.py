"""Choice of `trainer.logprob_chunk_tokens`: the number of tokens with logits in memory at once.

Logits [tokens, vocabulary] are computed in blocks of the vocabulary, each as large as the logits of one chunk of
tokens. Each block reads all hidden states, and adds to their float32 gradient. Few blocks save time, many save memory.
"""

from __future__ import annotations

from functools import partial

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.rounding import divide_up

CPU_CHUNK_TOKENS = 1024
"""Chunk on CPUs, in tokens: small, to fit CPU caches."""
LIMIT_BYTES = 1 << 30
"""Maximum of the logits in memory at once on a GPU, including torch's float32 copies."""
BLOCK_SHARE = 0.02
"""Share of the head's time that blocks may cost. Fewer blocks would hardly be faster, but need more memory."""

# Seconds on an H200 in bfloat16, fitted to the rows `logprobs_forward_backward` of tools/bench/results/h200.jsonl:
# 32,768 tokens, hidden size 2,560, vocabulary 151,936, 9 to 33 blocks. The largest error is 1.7 % with kernels, and
# 3.7 % with torch's operations. Smaller vocabularies (tensor parallelism) are extrapolated.
_PRODUCT_SECONDS = 8 / 783e12
"""Seconds per token, hidden channel and vocabulary row: four matrix products at the speed of a large one."""
_LOGIT_SECONDS = {True: 6.0e-12, False: 26.6e-12}
"""Seconds per logit of softmax, entropy and gradients. Key True: kernels read the logits in their stored type."""
_BLOCK_SECONDS = {True: 7.5e-12, False: 5.7e-12}
"""Seconds per token, hidden channel and block, to read hidden states and add to their gradient. Key True: with
kernels.
"""


def head_seconds(
    *, num_tokens: int, hidden_size: int, vocabulary_rows: int, num_blocks: int, has_kernels: bool
) -> float:
    """Return the seconds of log-probs, entropies and their gradients on an H200 in bfloat16.

    `vocabulary_rows` are the head's rows on a rank. `has_kernels`: GPU kernels read the logits in their stored type.
    """
    row_seconds = vocabulary_rows * (_PRODUCT_SECONDS * hidden_size + _LOGIT_SECONDS[has_kernels])
    return num_tokens * (row_seconds + num_blocks * hidden_size * _BLOCK_SECONDS[has_kernels])


def logit_bytes(itemsize: int, *, has_kernels: bool) -> int:
    """Return the bytes of one logit: `itemsize` bytes, and without kernels also two float32 copies."""
    return itemsize + (0 if has_kernels else 2 * 4)


def choose_chunk_tokens(
    *, num_tokens: int, hidden_size: int, vocabulary_rows: int, itemsize: int, has_kernels: bool
) -> int:
    """Return the smallest chunk of tokens whose blocks cost at most `BLOCK_SHARE` of the head's time on a GPU.

    `num_tokens` are a row's tokens on a rank, `vocabulary_rows` the head's rows on a rank, `itemsize` the bytes of a
    weight. The logits of a chunk never exceed `LIMIT_BYTES`.
    """
    predict_seconds = partial(
        head_seconds, num_tokens=1, hidden_size=hidden_size, vocabulary_rows=vocabulary_rows, has_kernels=has_kernels
    )
    seconds_without_blocks = predict_seconds(num_blocks=0)
    block_seconds = predict_seconds(num_blocks=1) - seconds_without_blocks
    max_tokens = max(1, LIMIT_BYTES // (vocabulary_rows * logit_bytes(itemsize, has_kernels=has_kernels)))
    num_blocks = max(1, int(BLOCK_SHARE * seconds_without_blocks / block_seconds), divide_up(num_tokens, by=max_tokens))
    # Blocks have at least 64 rows: from there on, more blocks do not make the chunk smaller.
    chunk_for_blocks = partial(_compute_even_chunk, num_tokens=num_tokens, vocabulary_rows=vocabulary_rows)
    while (chunk_tokens := chunk_for_blocks(num_blocks=num_blocks)) > max_tokens:
        if num_blocks * 64 >= vocabulary_rows:
            break
        num_blocks += 1
    return min(chunk_tokens, max_tokens)


def _compute_even_chunk(*, num_tokens: int, vocabulary_rows: int, num_blocks: int) -> int:
    """Return the chunk of tokens with as many logits as one of `num_blocks` equal blocks of the vocabulary.

    A block has logits of all `num_tokens`, a chunk has logits of the whole vocabulary.
    """
    # Blocks are multiples of 64 rows, as in `models.logprobs.vocabulary_blocks`.
    rows = 64 * divide_up(vocabulary_rows, by=64 * num_blocks)
    return divide_up(min(rows, vocabulary_rows) * num_tokens, by=vocabulary_rows)


def has_logit_kernels(recipe: Recipe, *, is_gpu: bool) -> bool:
    """Return whether GPU kernels read the logits in their stored type. False: torch makes float32 copies."""
    # Log-probs over retained tokens and divergences of whole distributions use torch's operations.
    is_truncated = any(source.recipe.rollout.sampling.is_truncated for source in recipe.sources)
    is_whole = recipe.loop == "distillation" and not recipe.has_advantages
    return is_gpu and not is_truncated and not is_whole


def logprob_chunk_tokens(recipe: Recipe, shape: ModelShape, parallel: ParallelConfig, *, is_gpu: bool) -> int:
    """Return the number of tokens with logits in memory at once: set in the recipe, or chosen for the model."""
    if (setting := recipe.trainer.logprob_chunk_tokens) is not None:
        return setting
    if not is_gpu:
        return CPU_CHUNK_TOKENS
    return choose_chunk_tokens(
        num_tokens=max(1, recipe.trainer.max_tokens_per_microbatch // parallel.cp),
        hidden_size=shape.hidden_size,
        vocabulary_rows=padded_vocab_size(shape.vocab_size, parallel.tp) // parallel.tp,
        itemsize=2 if recipe.model.dtype == "bfloat16" else 4,
        has_kernels=has_logit_kernels(recipe, is_gpu=is_gpu),
    )
