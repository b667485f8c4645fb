"""Algorithms: rewards in, loss per token out. Pure functions of tensors and floats.

They use no config object and no process group, and choose no device. The log-ratio, the ratio, the clip, the KL
estimate and the aggregation are separate functions. A named loss combines them in a few lines.

Reading order: `advantages` (rewards of samples to advantages of samples), `log_ratio`, `policy_losses` and `kl`
(token losses on flat packed tensors), then `reduction`. It aggregates token losses by one weight per token of the
global batch. Gradients therefore do not depend on the split of the batch. `sequence_masks` wraps a policy
loss. `covariance` chooses tokens of a whole step.

Each module ends in a table from names to functions. `config.formulas` reads the keys of these tables as the recipe's
choices. A new function needs one line there. The recipe sets its keywords by the field of the same name. Keywords
without a field are set in `advantage_kwargs`, `policy_loss_kwargs`, `importance_sampling_kwargs` or
`preference.loss_kwargs`.

The table lists names with different numbers in other libraries, and the field of `algorithm` choosing here, its default
first:

number                               | here                             | verl          | TRL            | ColossalRL
-------------------------------------|----------------------------------|---------------|----------------|--------------
advantage of the only sample of a    | `lone_sample`: zero, reward      | reward        | refused        | not a number
group                                |                                  |               |                |
epsilon added to GRPO's deviation    | 1e-6                             | 1e-6          | 1e-4           | 1e-4
REINFORCE++ with baseline, centred   | `normalize_by_std`: over the     | tokens of the | -              | tokens of the
by group, is divided by the          | samples of the batch; `preset`   | batch         |                | microbatch
deviation over                       | of this name: as verl            |               |                |
sequences that a mean over sequences | `count_masked_sequences`:        | trained ones, | all            | all
divides by                           | trained ones, all                | dr_grpo: none |                |
tokens that Dr. GRPO divides by      | longest allowed, of all turns    | longest of    | longest        | -
                                     | together                         | the batch     | allowed        |
k3 of a token is at most             | `k3_max`: no bound, a number     | 10            | no bound       | no bound
a sequence whose ratio of trainer to | `importance_sampling`: none,     | rollout_is    | sequence_      | -
engine is out of bounds              | clipped (sequence_tis), or       | clips,        | truncate       |
                                     | rejected; others count 1         | rollout_rs    | clips,         |
                                     | (sequence_rejection) or their    | rejects       | sequence_mask  |
                                     | ratio (sequence_mask)            |               | keeps others   |
"""
