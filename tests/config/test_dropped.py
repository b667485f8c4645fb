"""Values of a recipe's file that overrides leave without effect, and overrides that remove or empty."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.cli.checking import check_completely
from megarl.config import Recipe
from megarl.config.effects import conditions, may_be_idle, unmet
from megarl.config.idle import fields_set_by_user
from megarl.config.recipe import load, read, to_yaml, written_value
from megarl.config.schema import all_fields, section_of
from megarl.preflight.algorithm.learning import check_algorithm
from megarl.tracking.display import Display
from megarl.types import DataError
from tests.config.refusals import failure, faults

ROOT = Path(__file__).parents[2]
TOP = "name: small\nloop: rl\nmodel: {path: m}\ndata: {train: t.jsonl}\n"
Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(further: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(TOP + further)
        return path

    return write


SWITCHED_OFF = [
    pytest.param(
        "optimizer: {schedule: linear, min_learning_rate: 3e-5}",
        "optimizer.schedule=constant",
        ["optimizer.min_learning_rate = 3e-05"],
        "under optimizer.schedule=constant",
        id="schedule",
    ),
    pytest.param(
        "algorithm: {kl_coefficient: 0.01, kl_estimator: k1}",
        "algorithm.kl_coefficient=0",
        ["algorithm.kl_estimator = 'k1'"],
        "under algorithm.kl_coefficient=0.0",
        id="KL",
    ),
    pytest.param(
        "lora: {rank: 8, alpha: 16, dropout: 0.1}",
        "lora.rank=0",
        ["lora.alpha = 16.0", "lora.dropout = 0.1"],
        "under lora.rank=0",
        id="LoRA",
    ),
    pytest.param(
        "algorithm: {importance_sampling: tis, importance_sampling_high: 3}",
        "algorithm.importance_sampling=none",
        ["algorithm.importance_sampling_high = 3.0"],
        "without algorithm.importance_sampling",
        id="importance sampling",
    ),
    pytest.param(
        "algorithm: {preset: ppo, gae_lambda: 0.9}\ncritic: {clip: 0.5, optimizer: {learning_rate: 1e-5}}",
        "algorithm.preset=grpo",
        ["algorithm.gae_lambda = 0.9", "critic.optimizer.learning_rate = 1e-05", "critic.clip = 0.5"],
        "under algorithm.advantage=grpo",
        id="preset",
    ),
    pytest.param(
        "rollout: {placement: separate, ranks: 1, sync_every: 2}",
        "rollout.placement=colocated",
        ["rollout.ranks = 1", "rollout.sync_every = 2"],
        "under rollout.placement=colocated",
        id="placement",
    ),
    pytest.param(
        "rollout: {sampling: {temperature_schedule: linear, end_temperature: 0.6}}",
        "rollout.sampling.temperature_schedule=constant",
        ["rollout.sampling.end_temperature = 0.6"],
        "under rollout.sampling.temperature_schedule=constant",
        id="temperature",
    ),
    pytest.param(
        "optimizer: {warmup_steps: 5}",
        "optimizer.warmup_ratio=0.1",
        ["optimizer.warmup_steps = 5"],
        "under optimizer.warmup_ratio=0.1",
        id="share of warm-up for its steps",
    ),
    pytest.param(
        "optimizer: {warmup_ratio: 0.1}",
        "optimizer.warmup_steps=5",
        ["optimizer.warmup_ratio = 0.1"],
        "replaced by optimizer.warmup_steps of the command line",
        id="steps of warm-up for its share",
    ),
    pytest.param(
        "train: {epochs: 2}",
        "train.steps=5",
        ["train.epochs = 2.0"],
        "replaced by train.steps of the command line",
        id="steps for epochs",
    ),
    pytest.param(
        "rollout: {gpu_memory_utilization: 0.6}",
        "rollout.kv_cache_gib=4",
        ["rollout.gpu_memory_utilization = 0.6"],
        "replaced by rollout.kv_cache_gib of the command line",
        id="size for share of memory",
    ),
    pytest.param(
        "algorithm: {overlong_buffer: 64, overlong_penalty: 2}",
        "algorithm.overlong_buffer=0",
        ["algorithm.overlong_penalty = 2.0"],
        "without algorithm.overlong_buffer",
        id="overlong buffer",
    ),
    pytest.param(
        "algorithm: {policy_loss: clipped, clip_low: 0.1, dual_clip: 3}",
        "algorithm.policy_loss=policy_gradient",
        ["algorithm.clip_low = 0.1", "algorithm.dual_clip = 3.0"],
        "under algorithm.policy_loss=policy_gradient",
        id="policy loss",
    ),
    pytest.param(
        "reward: {functions: [code]}\nsandbox: {memory_mib: 512}",
        "reward.functions=[boxed]",
        ["sandbox.memory_mib = 512"],
        "under rollout.environment=single_turn",
        id="sandbox",
    ),
]


@pytest.mark.parametrize(("text", "override", "dropped", "reason"), SWITCHED_OFF)
def test_what_an_override_leaves_without_effect_is_dropped_with_one_notice(
    written: Written, text: str, override: str, dropped: list[str], reason: str
) -> None:
    path = written(text)
    recipe = load(path, [override])
    [notice] = recipe.notices
    assert notice.startswith(f"{path}: {', '.join(dropped)}: dropped, ") and reason in notice
    # The recipe is the one of a file without them.
    values = yaml.safe_load(path.read_text())
    for assignment in dropped:
        *sections, name = assignment.partition(" = ")[0].split(".")
        section = values
        for part in sections:
            section = section[part]
        del section[name]
    clean = path.with_name("clean.yaml")
    clean.write_text(yaml.safe_dump(values))
    without = load(clean, [override])
    assert without.notices == () and to_yaml(recipe) == to_yaml(without)
    assert recipe.model_dump(exclude_unset=True) == without.model_dump(exclude_unset=True)


def test_the_quickstart_takes_a_constant_schedule() -> None:
    recipe = load(ROOT / "launch/recipes/quickstart.yaml", ["optimizer.schedule=constant"])
    assert recipe.optimizer.schedule == "constant" and recipe.optimizer.min_learning_rate == 0
    assert len(recipe.notices) == 1


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        pytest.param("optimizer: {schedule: constant, min_learning_rate: 1e-5}", [], id="both in the file"),
        pytest.param(
            "optimizer: {schedule: constant, min_learning_rate: 1e-5}", ["train.steps=3"], id="another override"
        ),
        pytest.param("", ["optimizer.schedule=constant", "optimizer.min_learning_rate=1e-5"], id="both are overrides"),
        pytest.param("optimizer: {schedule: constant}", ["optimizer.min_learning_rate=1e-5"], id="idle override"),
        pytest.param(
            "optimizer: {schedule: linear, min_learning_rate: 3e-5}",
            ["optimizer={schedule: constant, min_learning_rate: 1e-5}"],
            id="both in one override",
        ),
    ],
)
def test_what_comes_from_one_place_is_an_error(written: Written, text: str, overrides: list[str]) -> None:
    [line] = faults(written(text), *overrides)
    assert line.strip().startswith(
        "optimizer.min_learning_rate = 1e-05: does nothing under optimizer.schedule=constant"
    )
    is_of_file = not any("min_learning_rate" in override for override in overrides)
    assert ("optimizer.min_learning_rate=default on the command line" in line) == is_of_file


@pytest.mark.parametrize("form", ["optimizer.min_learning_rate=default", "~optimizer.min_learning_rate"])
def test_a_field_is_removed(written: Written, form: str) -> None:
    path = written("optimizer: {schedule: constant, min_learning_rate: 1e-5}")
    recipe = load(path, [form])
    assert recipe.notices == () and recipe.optimizer.min_learning_rate == 0
    assert "min_learning_rate" not in recipe.optimizer.model_fields_set
    # An override that comes later counts.
    assert load(path, [form, "optimizer.schedule=linear", "optimizer.min_learning_rate=1e-6"]).notices == ()
    assert load(path, ["optimizer.min_learning_rate=3", form]) == recipe
    assert load(written(""), [form]).optimizer.min_learning_rate == 0, "nothing to remove"


@pytest.mark.parametrize("form", ["lora.rank=default", "~lora.rank"])
def test_a_removal_leaves_other_fields_without_effect_too(written: Written, form: str) -> None:
    [notice] = load(written("lora: {rank: 8, alpha: 16}"), [form]).notices
    assert "lora.alpha = 16.0: dropped, without effect under lora.rank=0" in notice


def test_what_is_removed_may_be_a_section_an_entry_or_an_item(written: Written) -> None:
    path = written("lora: {rank: 8, alpha: 3}\nreward: {functions: [boxed, format]}\nrollout: {vllm: {a: 1, b: 2}}")
    recipe = load(path, ["~lora", "~reward.functions.0", "~rollout.vllm.a"])
    assert recipe.lora == Recipe.model_fields["lora"].default and "lora" not in recipe.model_fields_set
    assert [function.name for function in recipe.reward.functions] == ["format"]
    assert recipe.rollout.vllm == {"b": 2}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("~optimizr.schedule", "~optimizr.schedule: there is no such value to remove", id="section"),
        pytest.param("~optimizer.shedule", "did you mean optimizer.schedule?", id="field"),
        pytest.param(
            "~rollout.vllm.c", "~rollout.vllm.c: there is no such value to remove; rollout.vllm has a", id="key"
        ),
        pytest.param(
            "~optimizer.schedule=linear", "write ~optimizer.schedule, or optimizer.schedule=linear", id="both"
        ),
        pytest.param("~", "'~': not an override", id="nothing"),
        pytest.param("~data.train", "data.train: missing", id="required"),
        pytest.param("trainer.dp=", "", id="null is a value"),
        pytest.param("train.steps=null", "train.steps=default on the command line removes it", id="null"),
        pytest.param("data.validation=", "data.validation=default on the command line removes it", id="empty text"),
    ],
)
def test_a_removal_that_cannot_be_is_named(written: Written, override: str, words: str) -> None:
    path = written("rollout: {vllm: {a: 1}}")
    if words:
        assert words in failure(path, override)
    else:
        load(path, [override])


def test_default_is_a_value_where_a_field_or_a_user_takes_it(written: Written) -> None:
    path = written("")
    recipe = load(path, ["data.system_prompt=default", "rollout.vllm.load_format=default", "name=default"])
    assert recipe.data.system_prompt == "default" and recipe.rollout.vllm == {"load_format": "default"}
    assert recipe.name == "default"
    assert load(path, ["data.system_prompt=default", "~data.system_prompt"]).data.system_prompt is None
    assert load(path, ["data.answer_field='default'"]).data.answer_field == "default"


def test_an_empty_dictionary_empties(written: Written) -> None:
    path = written("")
    path.write_text(
        "name: small\nloop: rl\nmodel: {path: m, chat_template_kwargs: {enable_thinking: false}}\n"
        "data: {train: t, validation: {a: x, b: y}}\nlora: {rank: 8}\n"
    )
    assert load(path, ["data.validation={}"]).data.validation == {}
    assert load(path, ["data.validation={}", "data.validation.c=z"]).data.validation == {"c": "z"}
    assert load(path, ["data.validation.c=z"]).data.validation == {"a": "x", "b": "y", "c": "z"}
    assert load(path, ["model.chat_template_kwargs={}"]).model.chat_template_kwargs == {}
    assert load(path, ["lora={}"]).lora.rank == 0
    for removal in ("~data.validation", "data.validation=default"):
        recipe = load(path, [removal])
        assert recipe.data.validation == {} and "validation" not in recipe.data.model_fields_set
    assert load(path, ["~data.validation.a"]).data.validation == {"b": "y"}


@pytest.mark.parametrize("override", ["data={validation: {}}", "data={validation: {}, train: u}"])
def test_an_empty_dictionary_inside_a_section_empties_too(written: Written, override: str) -> None:
    path = written("")
    path.write_text(path.read_text().replace("{train: t.jsonl}", "{train: t, validation: {math: x}, format: verl}"))
    data = load(path, [override]).data
    assert data.validation == {} and data.format == "verl"
    assert load(path, ["data={validation: {b: y}}"]).data.validation == {"math": "x", "b": "y"}
    path.write_text(TOP + "rollout: {vllm: {a.b: {c: 1}}}\n")
    assert load(path, ["rollout={vllm: {a.b: {}}}"]).rollout.vllm == {"a.b": {}}


TWO_ANSWERS = "{fields: {prompt: q, answer: y}, answer_field: z, ptx: talk.jsonl, train: t.jsonl}"


def test_a_fault_of_a_section_adds_no_fault_of_fields_that_need_it(written: Written) -> None:
    path = written("algorithm: {ptx_coefficient: 0.1, ptx_conversations: 4}")
    path.write_text(path.read_text().replace("{train: t.jsonl}", TWO_ANSWERS))
    [line] = faults(path)
    assert line.strip().startswith("data.fields.answer = 'y': ") and "~data.fields.answer" in line
    assert "talk.jsonl" not in line


@pytest.mark.parametrize(
    ("given", "override", "dropped", "answer_field", "fields"),
    [
        pytest.param(
            "fields: {prompt: q, answer: y}",
            "data.answer_field=z",
            "data.fields.answer = 'y'",
            "z",
            {"prompt": "q"},
            id="field",
        ),
        pytest.param(
            "fields: {prompt: q}, answer_field: y",
            "data.fields={answer: z}",
            "data.answer_field = 'y'",
            None,
            {"prompt": "q", "answer": "z"},
            id="role",
        ),
    ],
)
def test_an_override_of_the_gold_answer_replaces_its_other_name(
    written: Written, given: str, override: str, dropped: str, answer_field: str | None, fields: dict[str, str]
) -> None:
    path = written("")
    path.write_text(path.read_text().replace("{train: t.jsonl}", f"{{train: t, validation: {{a: v}}, {given}}}"))
    recipe = load(path, [override])
    replaced = override.partition("=")[0].replace("data.fields", "data.fields.answer")
    assert recipe.notices == (f"{path}: {dropped}: dropped, replaced by {replaced} of the command line",)
    assert recipe.data.answer_field == answer_field and recipe.data.fields == fields
    assert "data.fields.answer = 'z'" in failure(path, "data.fields.answer=z", "data.answer_field=x")


def test_a_validation_set_has_one_name_of_the_gold_answer_too(written: Written) -> None:
    path = written("")
    sets = "{train: t, validation: {a: {path: v, fields: {answer: y}}}}"
    path.write_text(path.read_text().replace("{train: t.jsonl}", sets))
    recipe = load(path, ["data.validation.a.answer_field=z"])
    assert "data.validation.a.fields.answer = 'y': dropped" in recipe.notices[0]
    both = failure(path, "data.validation.a.answer_field=z", "data.validation.a.fields.answer=x")
    assert "data.validation.a.fields.answer = 'x': " in both


@pytest.mark.parametrize("override", ["algorithm.ptx_coefficient=0", "~data.ptx", "data.ptx=null"])
def test_ptx_is_switched_off_by_either_of_its_fields(written: Written, override: str) -> None:
    path = written("algorithm: {ptx_coefficient: 0.1, ptx_conversations: 4}")
    path.write_text(path.read_text().replace("{train: t.jsonl}", "{train: t.jsonl, ptx: talk.jsonl}"))
    recipe = load(path, [override])
    assert recipe.algorithm.ptx_coefficient == 0 and recipe.data.ptx is None
    assert "algorithm.ptx_conversations = 4: dropped" in "\n".join(recipe.notices)
    assert list(check_algorithm(recipe)) == []


@pytest.mark.parametrize("override", ["~data.validation", "data.validation={}", "~data.validation.math"])
def test_the_best_checkpoint_is_dropped_without_an_evaluation(written: Written, override: str) -> None:
    path = written("checkpoint: {best: val/math/accuracy}")
    assert "checkpoint.best = 'val/math/accuracy': does nothing without data.validation" in failure(path)
    path.write_text(path.read_text().replace("{train: t.jsonl}", "{train: t.jsonl, validation: {math: m.jsonl}}"))
    recipe = load(path, [override])
    assert recipe.checkpoint.best is None
    assert "checkpoint.best = 'val/math/accuracy': dropped" in "\n".join(recipe.notices)


@pytest.mark.parametrize("sets", ["validation_conversations: {talk: v}", "validation: {}"])
def test_the_best_checkpoint_may_be_of_conversations_or_of_a_source(written: Written, sets: str) -> None:
    path = written("checkpoint: {best: val/talk/loss}")
    path.write_text(path.read_text().replace("{train: t.jsonl}", f"{{train: t, {sets}}}").replace("rl", "sft"))
    if "talk" in sets:
        assert load(path).checkpoint.best == "val/talk/loss"
    else:
        of_source = load(path, ["mixture.a.data={train: u, validation: {talk: v}}", "loop=rl", "~data.train"])
        assert of_source.checkpoint.best == "val/talk/loss"


def test_notices_are_printed_before_a_check_that_fails(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load(written("lora: {rank: 8, alpha: 16}"), ["lora.rank=0"])
    with pytest.raises(DataError):
        check_completely(recipe, Display(), is_start=False)
    assert "lora.alpha = 16.0: dropped" in capsys.readouterr().err


def test_the_config_of_a_run_has_all_fields_and_drops_none_aloud(written: Written) -> None:
    path = written("optimizer: {schedule: linear, min_learning_rate: 3e-5}")
    path.write_text(to_yaml(load(path)))
    draft = read(path, ["optimizer.schedule=constant"], is_of_run=True)
    assert draft.problems == () and draft.recipe.notices == ()
    [problem] = read(path, ["optimizer.schedule=constant", "optimizer.min_learning_rate=1"], is_of_run=True).problems
    assert problem.startswith("optimizer.min_learning_rate = 1.0: does nothing")


def test_a_page_of_errors_ends_with_what_was_dropped(written: Written) -> None:
    page = failure(written("lora: {rank: 8, alpha: 16}"), "lora.rank=0", "train.steps=x")
    assert page.splitlines()[0].endswith(": 1 error")
    assert page.splitlines()[-1].startswith("  notice: ") and "lora.alpha = 16.0" in page.splitlines()[-1]


SWITCHES = {
    "rl": (
        """
        loop: rl
        data: {train: t, validation: {a: x}, ptx: p, curriculum: {band: [0.1, 0.9]}}
        lora: {rank: 8}
        optimizer: {schedule: wsd}
        trainer: {recompute: selective}
        rollout: {sampling: {temperature_schedule: linear, end_temperature: 0.6}, stragglers: park}
        reward: {functions: [code], model: r}
        algorithm:
          {kl_coefficient: 0.1, kl_target: 0.1, reference_update_steps: 4, importance_sampling: icepop,
           dynamic_sampling: [0, 1], overlong_buffer: 8, ptx_coefficient: 0.1, aggregation: constant_length}
        train: {max_logprob_gap: 1, profile_steps: [2]}
        monitor: {port: 9400}
        """,
        [
            "loop=sft", "loop=preference", "loop=distillation", "data.ptx=null", "algorithm.ptx_coefficient=0",
            "data.curriculum.band=null", "lora.rank=0", "optimizer.schedule=constant", "optimizer.schedule=linear",
            "optimizer.name=sgd", "optimizer.warmup_ratio=0.1", "trainer.recompute=none",
            "rollout.sampling.temperature_schedule=constant", "rollout.stragglers=wait",
            "rollout.gpu_memory_utilization=0.5", "rollout.placement=separate", "reward.functions=[boxed]",
            "reward.model=null", "sandbox.url=http://127.0.0.1", "algorithm.advantage=rloo",
            "algorithm.normalize_by_std=false", "algorithm.policy_loss=policy_gradient", "algorithm.kl_coefficient=0",
            "algorithm.kl_target=null", "algorithm.kl_estimator=k1", "algorithm.reference_update_steps=null",
            "algorithm.importance_sampling=tis", "algorithm.importance_sampling=none",
            "algorithm.aggregation=token_mean", "algorithm.dynamic_sampling=null", "algorithm.overlong_buffer=0",
            "train.epochs=1", "train.max_logprob_gap=null", "train.profile_steps=[]", "monitor.port=null",
        ],
    ),
    "ppo": (
        "loop: rl\nalgorithm: {preset: ppo}\ncritic: {optimizer: {schedule: wsd}}",
        ["algorithm.advantage=grpo", "critic.optimizer.schedule=constant", "critic.optimizer.warmup_ratio=0.1"],
    ),
    "muon": (
        "loop: rl\noptimizer: {name: muon}\nalgorithm: {preset: ppo}\ncritic: {optimizer: {name: muon}}",
        ["optimizer.name=adam", "critic.optimizer.name=adam"],
    ),
    "spikes": ("loop: sft\ntrain: {on_spike: rollback}", ["train.on_spike=skip", "train.on_spike=ignore"]),
    "recorded": ("loop: rl\ntrain: {on_spike: skip}", ["train.record=tokens"]),
    "mixture": ("loop: rl\ntrain: {epochs: 1}", ["mixture.a.data.train=u"]),
    "pass@k": ("loop: rl\nalgorithm: {advantage: pass_at_k}", ["algorithm.advantage=grpo"]),
    "asynchronous": (
        "loop: rl\nrollout: {placement: separate, ranks: 1, max_staleness: 1}",
        ["rollout.placement=colocated", "rollout.max_staleness=0"],
    ),
    "agent": (
        "loop: rl\nrollout: {environment: verifiers, max_turns: 4}",
        ["rollout.environment=single_turn", "rollout.environment=command", "rollout.environment=calculator"],
    ),
    "container": (
        "loop: rl\nrollout: {environment: command, max_turns: 4, agent: {command: [run], sandbox: sandbox, image: i}}",
        ["rollout.environment=single_turn", "rollout.agent.sandbox=process"],
    ),
    "covariance": (
        "loop: rl\nalgorithm: {clip_cov_share: 2e-4, kl_cov_share: 2e-4}",
        ["algorithm.clip_cov_share=null", "algorithm.kl_cov_share=null"],
    ),
    "DPPO": ("loop: rl\nalgorithm: {policy_loss: dppo_tv}", ["algorithm.policy_loss=clipped"]),
    "roles": ("loop: rl\nalgorithm: {advantage: rae}", ["algorithm.advantage=grpo"]),
    "states": (
        "loop: rl\nrollout: {environment: guess_number, max_turns: 4}\nalgorithm: {state_weight: 1.0}",
        ["algorithm.state_weight=0"],
    ),
    "drafts": ("loop: sft\ntrainer: {mtp_loss_coefficient: 0.1}", ["trainer.mtp_loss_coefficient=null"]),
    "trained drafter": (
        "loop: rl\ntrainer: {drafter_learning_rate: 1e-4}", ["trainer.drafter_learning_rate=null"]
    ),
    "turns": (
        "loop: rl\nrollout: {environment: calculator, max_turns: 4}",
        ["rollout.environment=single_turn", "rollout.environment=verifiers", "rollout.max_turns=1",
         "algorithm.advantage=gae"],
    ),
    "sft": (
        "loop: sft\ndata: {train: t, validation: {a: x}}\ncheckpoint: {best: val/a/accuracy}",
        ["loop=rl", "data.validation={}"],
    ),
    "greedy": (
        "loop: rl\ndata: {train: t, validation: {a: x}}\nevaluation: {sampling: {temperature: 0.6}}",
        ["evaluation.sampling.temperature=0"],
    ),
    "dpo": ("loop: preference", ["loop=rl", "loop=reward_model", "preference.loss=simpo", "preference.loss=ipo"]),
    "kto": ("loop: preference\npreference: {loss: kto}", ["preference.loss=dpo"]),
    "reward model": ("loop: reward_model\npreference: {margin: 1}", ["loop=rl"]),
    "distillation": (
        "loop: distillation\ndistillation: {teacher: t, loss: top_k, divergence: jsd}",
        ["loop=rl", "distillation.loss=sampled_token", "distillation.divergence=forward_kl"],
    ),
    "rewards": (
        "loop: distillation\ndistillation: {teacher: t, use_task_rewards: true}\n"
        "algorithm: {dynamic_sampling: [0, 1], overlong_buffer: 8}",
        ["loop=rl", "distillation.use_task_rewards=false"],
    ),
    "self-distillation": (
        "loop: distillation\n"
        "distillation: {teacher: policy, teacher_prompt: '{prompt} {context}', context: [record.a]}",
        ["distillation.teacher_prompt=null"],
    ),
    "sampled tokens": ("loop: distillation\ndistillation: {teacher: t}", ["distillation.loss=full_vocabulary"]),
}  # fmt: skip
"""Recipes under which fields have an effect, and overrides that take it from some."""


def leaves() -> list[str]:
    """The fields that have an effect under some recipes only."""
    return [name for name, field in all_fields().items() if section_of(field) is None and conditions(name)]


def test_every_conditional_field_of_a_file_is_dropped_where_an_override_leaves_it_without_effect(
    tmp_path: Path,
) -> None:
    """Each recipe gives all fields that have an effect in it."""
    path, seen = tmp_path / "recipe.yaml", set()
    for name, (text, overrides) in SWITCHES.items():
        values = yaml.safe_load(TOP) | yaml.safe_load(textwrap.dedent(text))
        path.write_text(yaml.safe_dump(values))
        alone = load(path)
        effective = [field for field in leaves() if unmet(alone, field) is None and not may_be_idle(alone, field)]
        for field in effective:
            *sections, last = field.split(".")
            section = values
            for part in sections:
                section = section.setdefault(part, {})
            section[last] = written_value(alone, field)
        path.write_text(yaml.safe_dump(values))
        assert load(path).notices == ()
        for override in overrides:
            draft = read(path, [override])
            assert [problem for problem in draft.problems if "does nothing" in problem] == [], (name, override)
            key = override.partition("=")[0]
            left = {field for field in effective if unmet(draft.recipe, field) is not None} - {key}
            assert left, f"{override} switches nothing off"
            notices = "\n".join(draft.recipe.notices)
            assert {field for field in left if f"{field} = " not in notices} == set(), (name, override)
            assert not left & set(fields_set_by_user(draft.recipe)), (name, override)
            # checkpoint.best is valid once dropped, so only its notice shows that it was.
            seen |= left | {field for field in effective if f"{field} = " in notices}
    assert set(leaves()) - seen == set()
