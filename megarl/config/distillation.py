"""Recipe section `distillation`: teachers, their parallel sizes and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.annotations import Foreign, KeywordOf, OnlyIf
from megarl.config.conditions import DIVERGENCE, SAMPLED_TOKEN, TOP_K
from megarl.config.formulas import Formula
from megarl.config.section import Section


class DistillationConfig(Section):
    """Teachers and loss of a distillation."""

    teacher: Annotated[str | None,
        Foreign("teacher_model_name_or_path teacher_model teacher_model.model_path opd_teacher_load",
            note="of a source: mixture.NAME.distillation.teacher", example="models/Qwen3-32B",
            verl="distillation.teacher_models.teacher_model.model_path",
            NeMo_RL="teacher.model_name")] = None  # fmt: skip
    """Folder of the teacher, or its name in the Hub's cache: a language model with the policy's tokenizer. Vocabulary
    rows present in only one of the models are padding and ignored. In a mixture each source may have its own
    (mixture.NAME.distillation.teacher)."""
    tp: PositiveInt | None = None
    """Tensor-parallel size of the teachers. Default: 1 if another of the teachers' sizes is given; if none is, all are
    the trainer's."""
    pp: PositiveInt | None = None
    """Pipeline-parallel size of the teachers."""
    cp: PositiveInt | None = None
    """Context-parallel size of the teachers."""
    ep: PositiveInt | None = None
    """Expert-parallel size of the teachers."""
    etp: PositiveInt | None = None
    """Expert-tensor-parallel size of the teachers."""
    loss: Annotated[Literal["sampled_token", "top_k", "full_vocabulary"],
        Foreign("use_policy_gradient", note="true is sampled_token",
            verl="distillation.distillation_loss.use_policy_gradient")] = "sampled_token"  # fmt: skip
    """Loss on the policy's sampled tokens. sampled_token (default): policy gradient (algorithm.policy_loss), advantage
    = teacher minus policy log-prob, an estimate of the reverse KL. top_k, full_vocabulary: gradient of a divergence of
    both distributions, over the teacher's most likely tokens or all."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0), OnlyIf(SAMPLED_TOKEN)] = 0.0
    """Discount factor per token of later tokens' log-ratios in a token's advantage. 0 (default): only its own. 1:
    gradient of the reverse KL of whole sequences (MiniLLM, arXiv 2306.08543, eq. 2)."""
    max_log_ratio: Annotated[PositiveFloat | None, OnlyIf(SAMPLED_TOKEN),
        Foreign("loss_max_clamp", note="of sampled_token", example="10",
            verl="distillation.distillation_loss.loss_max_clamp")] = None  # fmt: skip
    """Clip a token's log-ratio to [-x, x], in nats. Default: no bound."""
    divergence: Annotated[str, OnlyIf(DIVERGENCE), Formula("divergences", "DIVERGENCES"),
        Foreign("distillation_loss.loss_mode kl_type", also="distillation.loss")] = "reverse_kl"  # fmt: skip
    """Divergence of top_k and full_vocabulary (`algorithms.divergences`): reverse_kl (default) = KL(policy || teacher),
    forward_kl = KL(teacher || policy), jsd = generalised Jensen-Shannon (GKD, arXiv 2306.13649, eq. 1)."""
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0), KeywordOf("distillation.divergence", "beta")] = 0.5
    """Weight of the teacher in the mixture distribution of the Jensen-Shannon divergence."""
    temperature: Annotated[PositiveFloat, OnlyIf(DIVERGENCE)] = 1.0
    """Temperature of both distributions in a divergence. sampled_token uses rollout.sampling.temperature instead, the
    temperature of the samples."""
    top_k: Annotated[PositiveInt, OnlyIf(TOP_K),
        Foreign("distillation_loss.topk topk_logits_k gkd_logits_topk", example="32",
            verl="distillation.distillation_loss.topk", NeMo_RL="distillation.topk_logits_k")] = 64  # fmt: skip
    """Number of the teacher's most likely tokens in a divergence (loss top_k)."""
    tail: Annotated[Literal["bucket", "renormalize"], OnlyIf(TOP_K),
        Foreign("zero_outside_topk", note="tokens beyond the teacher's are one outcome more",
            NeMo_RL="loss_fn.zero_outside_topk")] = "bucket"  # fmt: skip
    """Treatment of all other tokens (loss top_k). bucket (default): one more outcome, a lower bound of the full
    divergence. renormalize: ignored, and both distributions renormalised over the teacher's tokens; blind to the
    policy's probability of other tokens."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the teachers' parallel sizes. Empty: the trainer's sizes."""
        given = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        return {name: size or 1 for name, size in given.items()} if any(given.values()) else {}
