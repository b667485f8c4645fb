"""Algorithms: rewards in, loss per token out. Pure functions of tensors and floats.

No config object, no process group, no device decision. Kinship is by composition: the log-ratio, the ratio, the clip,
the KL estimate and the aggregation are functions of their own, and a named loss is a few lines of them.

Reading order: `advantages` (rewards of samples to advantages of samples), `log_ratio`, `policy_losses` and `kl`
(token losses on flat packed tensors), `reduction` (aggregation of token losses: a weight per token of the
global batch, so that gradients do not depend on how that batch is split).

Each module ends in a table, name to function; the recipe's choices are the keys of these tables, as `config.formulas`
reads them. A new function is one line there. Its keywords are set in the recipe: by the field of that name where there
is one, else in `advantage_kwargs`, `policy_loss_kwargs`, `importance_sampling_kwargs` or `preference.loss_kwargs`.

Where one name gives another number elsewhere, and the field of `algorithm` that chooses here, its default first:

number                               | here                             | verl          | TRL            | ColossalRL
-------------------------------------|----------------------------------|---------------|----------------|--------------
advantage of a sample alone in its   | `lone_sample`: zero, reward      | reward        | refused        | not a number
group                                |                                  |               |                |
epsilon beside GRPO's deviation      | 1e-6                             | 1e-6          | 1e-4           | 1e-4
REINFORCE++ with baseline, centred   | `normalize_by_std`: over the     | tokens of the | -              | tokens of the
by group, is divided by the          | samples of the batch; `preset`   | batch         |                | microbatch
deviation over                       | of this name: as verl            |               |                |
sequences that a mean over sequences | `count_masked_sequences`:        | trained ones, | all            | all
divides by                           | trained ones, all                | dr_grpo: none |                |
tokens that Dr. GRPO divides by      | longest allowed, of all turns    | longest of    | longest        | -
                                     | together                         | the batch     | allowed        |
k3 of a token is at most             | `k3_max`: no bound, a number     | 10            | no bound       | no bound
a sequence whose ratio of trainer to | `importance_sampling`: none,     | rollout_is    | sequence_      | -
engine is out of bounds              | cut (sequence_tis), or gone and  | cuts,         | truncate cuts, |
                                     | the others count 1 (sequence_    | rollout_rs    | sequence_mask  |
                                     | rejection) or their ratio        | rejects       | keeps others'  |
                                     | (sequence_mask)                  |               | ratio          |
"""
