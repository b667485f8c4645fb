"""The most likely tokens at each position of a scored prompt, as further rows of the policy's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.models.distillation.divergence import vocab_parallel_top_k
from megarl.models.policy import PolicyModel
from megarl.training.rows.microbatch import Microbatch


class TopTokensHead:
    """`ExtraHead` of the policy. Adds ids and log-probs of the `count` most likely tokens to its output; 0: adds
    nothing.

    Vocabulary blocks bound its memory, as they do for log-probs.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self.count = 0

    @torch.no_grad()
    def outputs(
        self, hidden_states: Tensor, next_tokens: Tensor, weight: Tensor, layer_arguments: Mapping[str, Any]
    ) -> Tensor | None:
        """Return float32 [2 * count, tokens]: ids, then log-probs. Shapes as in `ExtraHead`."""
        if not self.count:
            return None
        model, row = self._model, layer_arguments["packed_seq_params"]
        token_ids, logprobs, _ = vocab_parallel_top_k(
            row.prediction_states(model.gather_states(hidden_states)),
            weight,
            self.count,
            first_token_id=model.first_token_id,
            group=model.pg_collection.tp,
            temperature=1.0,
            chunk_tokens=model.logprob_chunk_tokens,
        )
        # float32 holds integers up to 16 million, more than any vocabulary has tokens.
        return row.spread_predictions(torch.cat([token_ids.T.float(), logprobs.T]))


def select_scores(output: Tensor, batch: Microbatch, non_loss_data: bool, *, count: int) -> tuple[Tensor, Microbatch]:
    """Return log-probs, and ids and log-probs of the `count` most likely tokens.

    The output is float32 [1 + 2 * count, own tokens].
    """
    # The second row has entropies. Rows of other extra heads may stand before those of the most likely tokens.
    return torch.cat([output[:1], output[len(output) - 2 * count :]]), batch
