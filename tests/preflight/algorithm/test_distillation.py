"""Teachers: that there is one for each source, that its tokens are the policy's, and that its layout fits it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.datasets.counts import count_records
from megarl.datasets.reward_trials import check_rewards
from megarl.families.shape import read_model_shape
from megarl.preflight import check
from megarl.types import ConfigError, DataError
from tests.preflight.model.test_models import with_value_head


@pytest.fixture
def distillation(recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]) -> Callable[..., Recipe]:
    """`distillation(tp=2, ...)`: a sound recipe with fields of its section changed."""

    def make(sections: dict[str, Any] | None = None, **changed: Any) -> Recipe:
        fields = {"teacher": str(tiny_model())} | changed
        return recipe(loop="distillation", distillation=fields, **(sections or {}))

    return make


def fault_of(recipe: Recipe) -> str:
    with pytest.raises(ConfigError) as caught:
        check(recipe)
    return str(caught.value)


def test_teachers_of_all_kinds_pass(distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]) -> None:
    for teacher in (tiny_model(), tiny_model(family="llama", vocab_size=700), tiny_model(family="qwen3_moe")):
        for loss in ("sampled_token", "top_k", "full_vocabulary"):
            assert check(distillation(teacher=str(teacher), loss=loss)).world_size == 1


def test_a_teacher_is_missing(distillation: Callable[..., Recipe]) -> None:
    assert "distillation.teacher: missing; give the folder of the teacher" in fault_of(distillation(teacher=None))


def test_of_a_mixture_the_source_without_a_teacher_is_named(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    teacher = str(tiny_model())
    mixture: dict[str, Any] = {"one": {"distillation": {"teacher": teacher}}, "other": {}}
    assert "mixture.other: distillation.teacher: missing" in fault_of(distillation({"mixture": mixture}, teacher=None))
    sound = distillation({"mixture": mixture}, teacher=str(tiny_model(seed=3)))
    assert check(sound).world_size == 1
    assert sound.teacher_numbers == {"one": 0, "other": 1} and sound.teachers["teacher0"] == teacher
    assert sound.further_models["mixture.one.distillation.teacher"] == teacher


def test_rewards_next_to_a_teacher_need_several_samples_functions_and_no_critic(
    distillation: Callable[..., Recipe],
) -> None:
    def with_rewards(**sections: Any) -> Recipe:
        return distillation(sections, use_task_rewards=True)

    assert check(with_rewards()).world_size == 1
    assert "algorithm.advantage = gae: a distillation has no critic" in fault_of(
        with_rewards(algorithm={"advantage": "gae"})
    )
    text = fault_of(with_rewards(train={"samples_per_prompt": 1}))
    assert "train.samples_per_prompt = 1: algorithm.advantage grpo compares several samples" in text
    assert "reward.functions is empty" in fault_of(with_rewards(reward={"functions": []}))
    assert check(distillation({"reward": {"functions": []}, "data": {"validation": {}}})).world_size == 1


def test_teachers_that_cannot_teach(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    reward = str(with_value_head(tiny_model(), tmp_path / "reward"))
    other = Path(shutil.copytree(tiny_model(), tmp_path / "other"))
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"<|im_end|>"', '"<|end|>"'))
    for changed, text in (
        ({"teacher": reward}, f"distillation.teacher = {reward}: is a reward model without a language head"),
        ({"teacher": str(other)}, f"distillation.teacher = {other}: its tokenizer is not the policy's"),
        ({"loss": "top_k", "top_k": 100_000}, "distillation.top_k = 100000: exceeds the "),
        ({"tp": 3}, "distillation.tp = 3"),
        ({"pp": 2}, "distillation.pp = 2"),
    ):
        assert text in fault_of(distillation(**changed))
    assert "distillation.tp = 8: does not divide the model's 4 attention heads" in fault_of(
        distillation({"cluster": {"ranks_per_node": 8}, "train": {"prompts_per_step": 8}}, tp=8)
    )
    with pytest.raises(DataError, match=r"distillation\.teacher: absent: model folder not found"):
        check(distillation(teacher="absent"))


TWO_RANKS: dict[str, Any] = {"cluster": {"ranks_per_node": 2}}


def test_a_teacher_on_one_rank_has_no_sequence_parallelism(distillation: Callable[..., Recipe]) -> None:
    given = distillation(TWO_RANKS | {"trainer": {"tp": 2, "sequence_parallel": True}}, tp=1)
    assert check(given).tp == 2 and given.for_teachers.trainer.sequence_parallel is None


def test_what_a_teacher_with_experts_needs(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    sections = TWO_RANKS | {"trainer": {"sequence_parallel": False}}
    found = fault_of(distillation(sections, teacher=str(tiny_model(family="qwen3_moe")), tp=2))
    assert "trainer.sequence_parallel = False: experts with distillation.tp 2 need sequence parallelism" in found


def test_a_dense_teacher_of_a_policy_with_experts(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    model = {"path": str(tiny_model(family="qwen3_moe"))}
    sections = TWO_RANKS | {"model": model, "trainer": {"ep": 2}}
    assert "or give the teachers parallel sizes of their own: distillation.tp" in fault_of(distillation(sections))
    assert check(distillation(sections, tp=1)).ep == 2


def test_a_teacher_sees_no_evaluation(distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]) -> None:
    sampling = {"evaluation": {"sampling": {"max_new_tokens": 200}}}
    short = str(tiny_model(max_position_embeddings=100))
    assert check(distillation(sampling, teacher=short)).world_size == 1
    sampling["rollout"] = {"sampling": {"max_new_tokens": 61}}
    assert "rollout.sampling.max_new_tokens = 61: exceeds" in fault_of(distillation(sampling, teacher=short))


def test_a_fault_of_the_trainer_is_told_once(distillation: Callable[..., Recipe]) -> None:
    found = fault_of(distillation({"rollout": {"tp": 3}}, tp=1))
    assert found.count("rollout.tp = 3: does not divide the 1 ranks") == 1


def test_prompts_without_answers_are_distilled_where_nothing_is_measured(
    distillation: Callable[..., Recipe], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"messages": {"role": "user", "content": "1 + 2"}}\n' * 2)
    sections: dict[str, Any] = {"data": {"train": str(bare)}, "reward": {"functions": []}}
    unmeasured = distillation(sections)
    assert check(unmeasured).world_size == 1 and count_records(unmeasured) == {"train": 2}
    check_rewards(unmeasured)
    with pytest.raises(DataError, match=r"no field for answer; .* Looked for gt_answer"):
        count_records(distillation({"data": {"train": str(bare)}}))
    sections["data"] |= {"validation": {"heldout": str(bare)}}
    assert "reward.functions is empty: add at least one" in fault_of(distillation(sections))


def test_a_run_of_no_steps_has_no_teacher(distillation: Callable[..., Recipe]) -> None:
    heldout = {"heldout": distillation().data.train}
    only = distillation({"train": {"steps": 0}, "data": {"validation": heldout}}, teacher="absent")
    assert check(only).world_size == 1 and only.teachers == only.teacher_numbers == {}


def test_no_more_tokens_are_asked_for_than_both_models_have(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    teacher, least = str(tiny_model(vocab_size=700)), read_model_shape(tiny_model()).vocab_size
    assert least < 700
    assert check(distillation(teacher=teacher, loss="top_k", top_k=least)).world_size == 1
    text = f"distillation.top_k = {least + 1}: exceeds the {least} tokens that distillation.teacher"
    assert text in fault_of(distillation(teacher=teacher, loss="top_k", top_k=least + 1))


def test_a_vocabulary_that_ends_before_the_tokenizer(
    distillation: Callable[..., Recipe], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "short"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 5}))
    with pytest.raises(DataError, match=r"distillation\.teacher: .* has the id \d+"):
        check(distillation(teacher=str(folder)))
