"""The driver's proxy of a teacher on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.rank_model import RankModel
from megarl.data.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class TeacherRankModel(RankModel):
    """A teacher that scores sampled tokens, or stores its whole distributions on the ranks."""

    async def teach(self, batch: TokenBatch) -> None:
        """Let the teacher's ranks compute and store distillation targets for the policy's next update."""
        teacher_batch = batch.with_arrays({})
        teacher_batch.target_keys = batch.target_keys
        # Repeated sequences are harmless: their rows write the same targets again.
        teacher_batch = teacher_batch.select(self.filled(batch.num_sequences))
        await self.group.scatter(
            f"{self.name}.teach", self.by_rank(self.forward_rows(teacher_batch, batch.num_sequences))
        )
