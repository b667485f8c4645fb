"""The driver's proxy of a teacher on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.rank_model import RankModel
from megarl.config.model_fields import field_of_model
from megarl.data.token_batch import TokenBatch
from megarl.types import MegarlError


@dataclass(frozen=True, slots=True)
class TeacherRankModel(RankModel):
    """A teacher that scores sampled tokens, or stores its whole distributions on the ranks."""

    async def store_targets(self, batch: TokenBatch) -> None:
        """Let the teacher's ranks compute and store distillation targets for the policy's next update.

        Raises MegarlError if targets are not finite. The policy's update would only be skipped, without this cause.
        """
        teacher_batch = batch.with_arrays({})
        teacher_batch.target_keys = batch.target_keys
        # Repeated sequences are harmless: their rows write the same targets again.
        teacher_batch = teacher_batch.select(self.indices_with_repeats(batch.num_sequences))
        num_not_finite = sum(
            await self.group.scatter(
                f"{self.name}.store_targets",
                self.give_to_first_ranks(self.forward_rows(teacher_batch, batch.num_sequences)),
            )
        )
        if num_not_finite:
            # The ranks count targets of repeated sequences too, so the number is a maximum.
            raise MegarlError(
                f"{field_of_model(self.name)}: the model {self.name} computed {num_not_finite} distributions that are "
                f"not finite, for a minibatch of {batch.loss_mask.sum()} trained tokens. Check its weights and "
                "config.json; for an overflow in its dtype, set model.dtype=float32"
            )
