"""The section of a recipe about distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.learning import Divergence
from megarl.config.section import Section


class DistillationConfig(Section):
    teacher: str | None = None
    """Folder of the teacher, or its name in the Hub's cache: a language model with the policy's tokenizer. Rows of its
    vocabulary beyond the policy's, and the other way round, are padding and left out. In a mixture each source may have
    its own: mixture.NAME.distillation.teacher."""
    tp: PositiveInt | None = None
    """Tensor-parallel size of the teachers. Where none of the teachers' sizes is given, all are the
    trainer's, else those left out are 1."""
    pp: PositiveInt | None = None
    """Pipeline-parallel size of the teachers."""
    cp: PositiveInt | None = None
    """Context-parallel size of the teachers."""
    ep: PositiveInt | None = None
    """Expert-parallel size of the teachers."""
    etp: PositiveInt | None = None
    """Expert-tensor-parallel size of the teachers."""
    loss: Literal["sampled_token", "top_k", "full_vocabulary"] = "sampled_token"
    """Loss on the tokens that the policy sampled: the policy gradient of the reverse KL estimated at the sampled token
    (sampled_token, an advantage of teacher minus policy log-prob, by algorithm.policy_loss); or the gradient of a
    divergence of the two distributions, over the teacher's most likely tokens (top_k) or all (full_vocabulary)."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Discount factor, per token, of the log-ratios of later tokens in a token's advantage: 0 for each token's own,
    1 for the gradient of the reverse KL of whole sequences (MiniLLM, arXiv 2306.08543, eq. 2)."""
    max_log_ratio: PositiveFloat | None = None
    """Clip the log-ratio of a token to between minus and plus this, in nats; default: no bound."""
    divergence: Divergence = "reverse_kl"
    """Divergence of top_k and full_vocabulary (`algorithms.divergences`): KL(policy || teacher) (reverse_kl),
    KL(teacher || policy) (forward_kl), or the generalised Jensen-Shannon divergence between them (jsd; GKD, arXiv
    2306.13649, eq. 1)."""
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """The teacher's share in the mixture of both that the Jensen-Shannon divergence is taken to."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions in a divergence; sampled_token takes rollout.sampling.temperature, at which the
    policy sampled."""
    top_k: PositiveInt = 64
    """Number of the teacher's most likely tokens that a divergence is taken over."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """All other tokens under top_k: together one outcome more (bucket, a lower bound of the divergence over all), or
    left out, and both distributions renormalised over the teacher's tokens (renormalize, which ignores what the
    policy gives to others)."""

    @property
    def sizes(self) -> dict[str, int]:
        """The teachers' parallel sizes; empty: those of the trainer."""
        given = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        return {name: size or 1 for name, size in given.items()} if any(given.values()) else {}
