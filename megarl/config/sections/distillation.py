"""Recipe section `distillation`: teachers, their parallel sizes and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.annotations import KeywordOf, OnlyIf
from megarl.config.conditions import DIVERGENCE, SAMPLED_TOKEN, TASK_REWARDS, TEACHER_PROMPT, TOP_K
from megarl.config.formulas import Formula
from megarl.config.section import Section

SELF_TEACHERS = {"reference": "reference", "policy": "live_teacher"}
"""Teachers that are the policy itself, with its initial or live weights: their names on the ranks, by the value of
distillation.teacher.
"""


class DistillationConfig(Section):
    """Teachers and loss of a distillation."""

    teacher: str | None = None
    """The teacher, also for each source of a mixture. policy: the policy before each update. reference: the initial
    policy (updated: algorithm.reference_update_steps). Else the folder or Hub name of a language model with the
    policy's tokenizer. Vocabulary rows that only one of both models has are padding, and are ignored."""
    teacher_prompt: str | None = None
    """Last user message of the teacher's own prompt. {prompt} is the policy's message, {context} a text hidden from the
    policy. Self-distillation: OPSD (arXiv 2601.18734), SDFT (2601.19897), SDPO (2601.20802). Default: the teacher reads
    the policy's prompt."""
    context: Annotated[tuple[str, ...], OnlyIf(TEACHER_PROMPT)] = ()
    """Parts of {context} in teacher_prompt, joined by empty lines. record.NAME: a field of the record. feedback: the
    environment's messages after the last completion. success: the first other attempt of the group with a correct
    answer. A sample without any part is not trained (metric distillation/no_context)."""
    max_teacher_tokens: Annotated[PositiveInt | None, OnlyIf(TEACHER_PROMPT)] = None
    """Maximum tokens of the teacher's prompt and the sample together. Longer samples are not trained (metric
    distillation/too_long). Default: twice data.max_prompt_tokens + rollout.sampling.max_new_tokens."""
    tp: PositiveInt | None = None
    """Tensor-parallel size of the teachers. Default: trainer.tp if distillation.tp, pp, cp, ep and etp are all left
    out, otherwise 1."""
    pp: PositiveInt | None = None
    """Pipeline-parallel size of the teachers. Default: trainer.pp if distillation.tp, pp, cp, ep and etp are all left
    out, otherwise 1."""
    cp: PositiveInt | None = None
    """Context-parallel size of the teachers. Default: trainer.cp if distillation.tp, pp, cp, ep and etp are all left
    out, otherwise 1."""
    ep: PositiveInt | None = None
    """Expert-parallel size of the teachers. Default: trainer.ep if distillation.tp, pp, cp, ep and etp are all left
    out, otherwise 1."""
    etp: PositiveInt | None = None
    """Expert-tensor-parallel size of the teachers. Default: trainer.etp if distillation.tp, pp, cp, ep and etp are all
    left out, otherwise 1."""
    loss: Literal["sampled_token", "top_k", "full_vocabulary"] = "sampled_token"
    """Loss on the policy's samples. sampled_token (default): policy gradient (algorithm.policy_loss); a token's
    advantage is its teacher log-prob minus its policy log-prob. top_k, full_vocabulary: divergence of policy and
    teacher, over the teacher's top_k tokens or the whole vocabulary."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0), OnlyIf(SAMPLED_TOKEN)] = 0.0
    """Discount factor, per token, of later tokens' log-ratios (teacher minus policy) in a token's advantage. 0
    (default): only the token's own log-ratio. 1: gradient of the sequence-level reverse KL (MiniLLM, arXiv 2306.08543,
    eq. 2)."""
    max_log_ratio: Annotated[PositiveFloat | None, OnlyIf(SAMPLED_TOKEN)] = None
    """Clip a token's log-ratio of teacher to policy to [-x, x], in nats. Default: no clipping."""
    use_task_rewards: Annotated[bool, OnlyIf(SAMPLED_TOKEN)] = False
    """Train on rewards too (loss sampled_token). true: add the advantages of algorithm.advantage to the teacher's
    log-ratios; a preset's KL penalty has no effect. false (default): only measure rewards."""
    kl_coefficient: Annotated[PositiveFloat, OnlyIf(TASK_REWARDS)] = 1.0
    """Weight of the teacher's log-ratios, added to the advantages of rewards (use_task_rewards). With gamma 1 it is the
    coefficient of the KL towards the teacher."""
    divergence: Annotated[str, OnlyIf(DIVERGENCE), Formula("divergences", "DIVERGENCES")] = "reverse_kl"
    """Divergence of the losses top_k and full_vocabulary. reverse_kl (default): KL(policy || teacher). forward_kl:
    KL(teacher || policy). jsd: generalised Jensen-Shannon (GKD, arXiv 2306.13649, eq. 1). Code:
    megarl/algorithms/divergences.py."""
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0), KeywordOf("distillation.divergence", "beta")] = 0.5
    """Weight of the teacher in the mixture distribution of the Jensen-Shannon divergence (divergence jsd)."""
    temperature: Annotated[PositiveFloat, OnlyIf(DIVERGENCE)] = 1.0
    """Temperature of policy and teacher in the divergence (losses top_k, full_vocabulary). The loss sampled_token has
    rollout.sampling.temperature instead."""
    top_k: Annotated[PositiveInt, OnlyIf(TOP_K)] = 64
    """Number of the teacher's most likely tokens compared by the divergence (loss top_k)."""
    tail: Annotated[Literal["bucket", "renormalize"], OnlyIf(TOP_K)] = "bucket"
    """Treatment of tokens outside the teacher's top_k (loss top_k). bucket (default): count them as one outcome, a
    lower bound of the full divergence. renormalize: leave them out and renormalise both distributions; the policy's
    probability of them then has no effect."""

    @property
    def sizes(self) -> dict[str, int]:
        """Parallel sizes of the teachers (tp, pp, cp, ep, etp). Empty: the trainer's."""
        optional_sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        return {name: size or 1 for name, size in optional_sizes.items()} if any(optional_sizes.values()) else {}
