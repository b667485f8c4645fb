"""Fields that would do nothing under a recipe's loop or algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.config.recipe import load, read, recipe_changes, to_yaml
from megarl.config.sections.learning import PRESETS
from megarl.files.import_path import import_object
from tests.config.refusals import faults


@pytest.mark.parametrize(
    ("overrides", "field", "reason", "remedy"),
    [
        pytest.param(
            ["algorithm.gamma=0.9"],
            "algorithm.gamma = 0.9",
            "under algorithm.advantage=grpo",
            "algorithm.advantage to gae",
            id="gamma under grpo",
        ),
        pytest.param(
            ["preference.beta=0.2"], "preference.beta = 0.2", "under loop=rl", "loop to preference", id="beta"
        ),
        pytest.param(
            ["algorithm.reward_order=normalize_then_sum", "algorithm.advantage=rloo"],
            "algorithm.reward_order = 'normalize_then_sum'",
            "under algorithm.advantage=rloo",
            "algorithm.advantage to grpo",
            id="order of rewards without a deviation",
        ),
        pytest.param(
            ["algorithm.reference_update_steps=4"],
            "algorithm.reference_update_steps = 4",
            "under algorithm.kl_coefficient=0.0",
            "algorithm.kl_coefficient above 0",
            id="no reference to move",
        ),
        pytest.param(
            ["critic.optimizer.betas=[0.9,0.99]"],
            "critic.optimizer.betas = [0.9, 0.99]",
            "under algorithm.advantage=grpo",
            "algorithm.advantage to gae",
            id="critic without gae",
        ),
        pytest.param(
            ["algorithm.policy_loss=policy_gradient", "algorithm.clip_low=0.1"],
            "algorithm.clip_low = 0.1",
            "under algorithm.policy_loss=policy_gradient",
            "algorithm.policy_loss to clipped, gspo, gmpo, cispo, dppo_tv or dppo_kl",
            id="clip",
        ),
        pytest.param(
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_placement=reward", "algorithm.kl_unbiased=true"],
            "algorithm.kl_unbiased = True",
            "under algorithm.kl_placement=reward",
            "algorithm.kl_placement to loss",
            id="unbiased KL outside of the loss",
        ),
        pytest.param(
            ["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k2", "algorithm.kl_unbiased=true"],
            "algorithm.kl_unbiased = True",
            "under algorithm.kl_estimator=k2",
            "algorithm.kl_estimator to k3 or k1",
            id="unbiased KL by k2",
        ),
        pytest.param(
            ["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"],
            "algorithm.dual_clip = 3.0",
            "under algorithm.policy_loss=cispo",
            "algorithm.policy_loss to clipped",
            id="clip of another loss",
        ),
        pytest.param(
            ["algorithm.turn_discount=0.9"],
            "algorithm.turn_discount = 0.9",
            "under rollout.environment=single_turn",
            "rollout.environment to one with several turns",
            id="turn discount of one turn",
        ),
        pytest.param(
            ["algorithm.turn_discount=0.9", "rollout.environment=games.py:Game", "rollout.max_turns=1"],
            "algorithm.turn_discount = 0.9",
            "under rollout.max_turns=1",
            "raise rollout.max_turns: there is no second turn",
            id="turn discount under a limit of one turn",
        ),
        pytest.param(
            ["algorithm.turn_discount=0.9", "algorithm.advantage=gae", "rollout.environment=games.py:Game"],
            "algorithm.turn_discount = 0.9",
            "under algorithm.advantage=gae",
            "gae has algorithm.gamma",
            id="turn discount under gae",
        ),
        pytest.param(
            ["algorithm.turn_discount=0.9", "algorithm.advantage=pass_at_k", "rollout.environment=games.py:Game"],
            "algorithm.turn_discount = 0.9",
            "under algorithm.advantage=pass_at_k",
            "pass_at_k counts passes",
            id="turn discount under pass@k",
        ),
        pytest.param(
            ["rollout.max_staleness=2", "rollout.stragglers=abort"],
            "rollout.max_staleness = 2",
            "under rollout.placement=colocated and rollout.stragglers=abort",
            "set rollout.placement to separate, or rollout.stragglers to park",
            id="staleness of what is given up",
        ),
        pytest.param(
            ["rollout.ranks=2"],
            "rollout.ranks = 2",
            "under rollout.placement=colocated",
            "set rollout.placement to separate",
            id="ranks of engines that share them",
        ),
        pytest.param(
            ["rollout.placement=separate", "rollout.ranks=1", "trainer.align_ranks=false"],
            "trainer.align_ranks = False",
            "under rollout.placement=separate",
            "set rollout.placement to colocated",
            id="order of ranks that share nothing",
        ),
        pytest.param(
            ["loop=sft", "rollout.placement=separate"],
            "rollout.placement = 'separate'",
            "without data.validation",
            "give",
            id="placement of no engine",
        ),
        pytest.param(
            ["rollout.sync_every=2"],
            "rollout.sync_every = 2",
            "under rollout.placement=colocated",
            "set rollout.placement to separate",
            id="engines without ranks of their own",
        ),
        pytest.param(
            ["rollout.recompute_kv=false", "rollout.placement=separate"],
            "rollout.recompute_kv = False",
            "under rollout.placement=separate",
            "rollout.max_staleness to at least 1",
            id="keys and values of requests that no reshard interrupts",
        ),
        pytest.param(
            ["weights.overlap=true"],
            "weights.overlap = True",
            "under rollout.placement=colocated",
            "set rollout.placement to separate",
            id="weights sent beside a step by ranks that sample themselves",
        ),
        pytest.param(
            ["weights.overlap=true", "rollout.placement=separate", "rollout.max_staleness=0"],
            "weights.overlap = True",
            "under rollout.placement=separate and rollout.max_staleness=0",
            "rollout.max_staleness to at least 1",
            id="weights that the next step's samples wait for",
        ),
        pytest.param(
            ["rollout.stragglers=park", "rollout.placement=separate"],
            "rollout.stragglers = 'park'",
            "under rollout.placement=separate",
            "set rollout.placement to colocated",
            id="stragglers where no engine sleeps",
        ),
        pytest.param(
            ["train.max_logprob_gap=0.1", "rollout.placement=separate", "rollout.max_staleness=1"],
            "train.max_logprob_gap = 0.1",
            "under rollout.placement=separate and rollout.max_staleness=1",
            "set rollout.max_staleness to 0",
            id="gap of stale tokens",
        ),
        pytest.param(
            ["algorithm.oversampling=2"],
            "algorithm.oversampling = 2.0",
            "under rollout.stragglers=wait without algorithm.dynamic_sampling",
            "give algorithm.dynamic_sampling, or set rollout.stragglers to park or abort",
            id="oversampling",
        ),
        pytest.param(
            ["algorithm.kl_target=0.1"],
            "algorithm.kl_target = 0.1",
            "under algorithm.kl_coefficient=0.0",
            "set algorithm.kl_coefficient above 0",
            id="KL target",
        ),
        pytest.param(
            ["algorithm.importance_sampling=tis", "algorithm.importance_sampling_low=0.1"],
            "algorithm.importance_sampling_low = 0.1",
            "under algorithm.importance_sampling=tis",
            "to icepop, sequence_rejection,",
            id="bound of another correction",
        ),
        pytest.param(
            ["algorithm.advantage=rloo", "algorithm.normalize_by_std=true"],
            "algorithm.normalize_by_std = True",
            "under algorithm.advantage=rloo",
            "to grpo, reinforce_plus_plus or",
            id="deviation",
        ),
        pytest.param(["algorithm.pass_k=2"], "algorithm.pass_k = 2", "=grpo", "to pass_at_k", id="pass k"),
        pytest.param(
            ["algorithm.ptx_coefficient=0.1"],
            "algorithm.ptx_coefficient = 0.1",
            "without data.ptx",
            "give data.ptx",
            id="ptx without data",
        ),
        pytest.param(
            ["data.ptx=talk.jsonl"],
            "data.ptx = 'talk.jsonl'",
            "under algorithm.ptx_coefficient=0.0",
            "set algorithm.ptx_coefficient above 0",
            id="data without ptx",
        ),
        pytest.param(
            ["rollout.max_turns=4"],
            "rollout.max_turns = 4",
            "under rollout.environment=single_turn",
            "set rollout.environment to another",
            id="turns of a single turn",
        ),
        pytest.param(
            ["rollout.truncated_turn=close"],
            "rollout.truncated_turn = 'close'",
            "under rollout.environment=single_turn",
            "set rollout.environment to another",
            id="end of the only turn",
        ),
        pytest.param(
            ["evaluation.every_steps=10"],
            "evaluation.every_steps = 10",
            "without data.validation",
            "give data.validation",
            id="evaluation of no set",
        ),
        pytest.param(
            ["health.validation_drop=0.1"],
            "health.validation_drop = 0.1",
            "without data.validation",
            "give data.validation",
            id="fall of no accuracy",
        ),
        pytest.param(
            ["loop=preference", "health.entropy_rise=2"],
            "health.entropy_rise = 2.0",
            "under loop=preference",
            "set loop to rl, sft",
            id="entropy that no loss measures",
        ),
        *(
            pytest.param(
                ["data.validation.a=b", f"evaluation.sampling.{value}"],
                f"evaluation.sampling.{value.replace('=', ' = ')}",
                "under evaluation.samples_per_prompt=1 without evaluation.sampling.temperature",
                "set evaluation.sampling.temperature above 0",
                id=f"greedy {value}",
            )
            for value in ("top_p=0.9", "top_k=20", "min_p=0.1")
        ),
        pytest.param(
            ["loop=reward_model", "trainer.offload=[optimizer]"],
            "trainer.offload = ",
            "under loop=reward_model",
            "set loop to rl, sft or distillation",
            id="states offloaded for no engine",
        ),
        pytest.param(
            [
                "rollout.environment=calculator",
                "rollout.environment_processes=0",
                "rollout.environment_memory_gib=2",
            ],
            "rollout.environment_memory_gib = 2.0",
            "under rollout.environment_processes=0",
            "set it above 0",
            id="memory of no process",
        ),
        *(
            pytest.param(
                ["rollout.environment=verifiers", f"rollout.agent.{field}=[a]"],
                f"rollout.agent.{field} = ",
                "under rollout.environment=verifiers",
                "set rollout.environment to command",
                id=f"{field} of no program",
            )
            for field in ("command", "environment")
        ),
        pytest.param(
            ["checkpoint.best=val/a/accuracy"],
            "checkpoint.best = 'val/a/accuracy'",
            "without data.validation",
            "give data.validation",
            id="best of no set",
        ),
        pytest.param(
            ["reward.model_clip=5"], "reward.model_clip = 5.0", "without reward.model", "give", id="reward model"
        ),
        pytest.param(["lora.alpha=16"], "lora.alpha = 16.0", "under lora.rank=0", "lora.rank above 0", id="lora"),
        pytest.param(
            ["optimizer.decay_steps=3"], "optimizer.decay_steps = 3", "schedule=constant", "to wsd", id="decay"
        ),
        pytest.param(
            ["rollout.sampling.end_temperature=0.6"],
            "rollout.sampling.end_temperature = 0.6",
            "under rollout.sampling.temperature_schedule=constant",
            "to linear or cosine",
            id="end of no schedule",
        ),
        pytest.param(
            ["data.validation_conversations.a=b"], "data.validation_conversations = ", "loop=rl", "to sft", id="sft"
        ),
        pytest.param(
            ["loop=sft", "train.epochs_per_step=2"], "train.epochs_per_step = 2", "=sft", "loop to rl", id="passes"
        ),
        pytest.param(["loop=sft", "rollout.tp=2"], "rollout.tp = 2", "without data.validation", "give", id="no engine"),
        pytest.param(
            ["loop=sft", "algorithm.preset=dapo"], "algorithm.preset = 'dapo'", "=sft", "loop to rl", id="preset"
        ),
        pytest.param(
            ["loop=preference", "preference.loss=kto", "preference.margin=1"],
            "preference.margin = 1.0",
            "under preference.loss=kto",
            "preference.loss to dpo or simpo",
            id="margin of kto",
        ),
        pytest.param(
            ["loop=reward_model", "preference.loss=ipo"],
            "preference.loss = 'ipo'",
            "=reward_model",
            "to preference",
            id="loss of a reward model",
        ),
        pytest.param(
            ["distillation.teacher=t"], "distillation.teacher = 't'", "loop=rl", "loop to distillation", id="teacher"
        ),
        pytest.param(
            ["loop=distillation", "distillation.top_k=8"],
            "distillation.top_k = 8",
            "under distillation.loss=sampled_token",
            "set distillation.loss to top_k",
            id="top k of sampled tokens",
        ),
        pytest.param(
            ["loop=distillation", "distillation.loss=full_vocabulary", "distillation.gamma=1"],
            "distillation.gamma = 1.0",
            "under distillation.loss=full_vocabulary",
            "distillation.loss to sampled_token",
            id="discount of a divergence",
        ),
        pytest.param(
            ["loop=distillation", "distillation.loss=top_k", "distillation.jsd_beta=0.1"],
            "distillation.jsd_beta = 0.1",
            "under distillation.divergence=reverse_kl",
            "to jsd",
            id="beta of another divergence",
        ),
        pytest.param(
            ["loop=distillation", "distillation.loss=top_k", "algorithm.clip_low=0.1"],
            "algorithm.clip_low = 0.1",
            "under distillation.loss=top_k",
            "set distillation.loss to sampled_token",
            id="clip of a divergence",
        ),
        pytest.param(
            ["loop=distillation", "distillation.teacher=policy", "algorithm.reference_update_steps=4"],
            "algorithm.reference_update_steps = 4",
            "distillation.teacher=policy",
            "distillation.teacher to reference",
            id="moving reference of a live teacher",
        ),
        pytest.param(
            ["loop=distillation", "distillation.context=[success]"],
            "distillation.context = ",
            "without distillation.teacher_prompt",
            "give distillation.teacher_prompt",
            id="context without a prompt",
        ),
        pytest.param(
            ["loop=distillation", "algorithm.kl_coefficient=0.1"],
            "algorithm.kl_coefficient = 0.1",
            "under loop=distillation",
            "loop to rl",
            id="reference of a distillation",
        ),
        pytest.param(
            ["loop=preference", "weights.verify_every=3"], "weights.verify_every", "=preference", "rl", id="reshard"
        ),
    ],
)
def test_a_field_that_does_nothing_is_named_with_reason_and_remedy(
    small: Path, overrides: list[str], field: str, reason: str, remedy: str
) -> None:
    [line] = faults(small, *overrides)
    assert line.startswith(f"  {field}")
    assert "does nothing " in line
    assert reason in line
    assert "; leave it out, or " in line
    assert remedy in line


def test_the_value_that_is_the_default_counts_where_it_is_given(small: Path) -> None:
    assert faults(small, "algorithm.gamma=1.0")


@pytest.mark.parametrize("preset", PRESETS)
def test_values_of_a_preset_may_lie_idle(small: Path, preset: str) -> None:
    """rloo's placement of the KL without its KL; cispo's clip without cispo."""
    load(small, [f"algorithm.preset={preset}", "algorithm.kl_coefficient=0", "algorithm.policy_loss=policy_gradient"])


def test_a_margin_is_for_reward_models_too(small: Path) -> None:
    assert load(small, ["loop=reward_model", "preference.margin=1"]).preference.margin == 1


def test_what_is_printed_has_an_effect_and_reads_back(small: Path) -> None:
    for overrides, kept, left_out in (
        ([], ("kl_coefficient", "clip_low", "normalize_by_std"), ("gamma", "kl_estimator", "critic", "preference")),
        (["algorithm.preset=ppo"], ("gamma", "kl_estimator", "critic"), ("normalize_by_std", "max_attempts")),
        (
            ["loop=preference"],
            ("beta", "reference_update_steps"),
            ("desirable_weight", "rollout", "advantage", "reward"),
        ),
        (["loop=sft"], ("aggregation",), ("advantage", "rollout", "answer_field")),
        (["loop=distillation"], ("gamma", "clip_low", "samples_per_prompt"), ("advantage", "divergence", "critic")),
    ):
        recipe = load(small, overrides)
        for comments in (False, True):
            text = to_yaml(recipe, comments=comments)
            names = {line.strip().partition(":")[0] for line in text.splitlines()}
            assert set(kept) <= names
            assert not names & set(left_out)
            again = small.with_name("again.yaml")
            again.write_text(text)
            assert to_yaml(load(again)) == to_yaml(recipe)


def test_a_field_that_begins_to_count_has_not_changed(small: Path) -> None:
    """What the earlier recipe left out, since it did nothing, was its default."""
    earlier = yaml.safe_load(to_yaml(load(small)))
    now = load(small, ["algorithm.advantage=gae", "algorithm.gamma=0.9"])
    assert recipe_changes(earlier, now) == [
        "algorithm.advantage: grpo -> gae",
        "algorithm.gamma: 1.0 -> 0.9",
        "algorithm.normalize_by_std: True -> (not set)",
        "algorithm.reward_order: sum_then_normalize -> (not set)",
        "algorithm.lone_sample: zero -> (not set)",
    ]


@pytest.mark.parametrize(("longest", "buffer"), [(16384, 3276), (1024, 204), (9, 1), (4, 1)])
def test_dapo_punishes_a_fifth_of_the_longest_completion(small: Path, longest: int, buffer: int) -> None:
    recipe = load(small, ["algorithm.preset=dapo", f"rollout.sampling.max_new_tokens={longest}"])
    assert recipe.algorithm.overlong_buffer == buffer
    again = small.with_name("again.yaml")
    again.write_text(to_yaml(recipe))
    assert load(again) == recipe


def test_the_buffer_that_a_recipe_gives_counts(small: Path) -> None:
    assert load(small, ["algorithm.preset=dapo", "algorithm.overlong_buffer=7"]).algorithm.overlong_buffer == 7
    assert load(small, ["algorithm.preset=dapo", "algorithm.overlong_buffer=null"]).algorithm.overlong_buffer is None
    assert load(small, ["algorithm.preset=grpo"]).algorithm.overlong_buffer is None
    assert "algorithm.overlong_buffer = 0.2: must be a valid integer" in "".join(
        faults(small, "algorithm.overlong_buffer=0.2")
    )


def test_a_run_may_go_on_with_fields_that_no_longer_count(small: Path) -> None:
    """Its config.yaml has all fields; only what the command line gives is a fault where it does nothing."""
    config = small.with_name("config.yaml")
    config.write_text(to_yaml(load(small, ["algorithm.advantage=gae", "algorithm.kl_coefficient=0.1"])))
    overrides = ["algorithm.advantage=grpo", "algorithm.kl_coefficient=0"]
    draft = read(config, overrides, is_of_run=True)
    assert draft.problems == ()
    assert "gamma" not in to_yaml(draft.recipe)
    [problem] = read(config, [*overrides, "algorithm.gamma=0.9"], is_of_run=True).problems
    assert problem.startswith("algorithm.gamma = 0.9: does nothing under algorithm.advantage=grpo")
    assert load(config, overrides).notices, "as a recipe of the user's own, what is dropped is named"


def test_keywords_that_an_own_loss_may_not_take_are_printed_where_given(small: Path) -> None:
    own = "algorithm.policy_loss=own.py:loss"
    again = small.with_name("again.yaml")
    for given, printed in (((), False), (("algorithm.clip_low=0.1",), True)):
        recipe = load(small, [own, *given])
        again.write_text(to_yaml(recipe))
        assert ("clip_low" in again.read_text()) == printed
        assert load(again) == recipe


def test_keywords_that_an_own_loss_takes_are_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has imported its loss, and the loss gets the defaults of these fields: config.yaml has them."""
    monkeypatch.chdir(tmp_path)
    Path("own_clip.py").write_text("def loss(policy_logprobs, old_logprobs, advantages, *, clip_high): ...\n")
    recipe = load(small, ["algorithm.policy_loss=own_clip.py:loss"])
    assert "clip_high" not in to_yaml(recipe)
    import_object(recipe.algorithm.policy_loss, "algorithm.policy_loss")
    written = yaml.safe_load(to_yaml(recipe))["algorithm"]
    assert written["clip_high"] == 0.2 and "clip_low" not in written
