"""Scores of a pool: those of the functions, their sum, and the failures among them."""

import asyncio
import os
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.processes.process_tree import descendants
from megarl.rewards.scoring.calling import Sample
from megarl.types import ConfigError, Reward
from tests.rewards.pools import ZERO, all_scored, failures_of, pool_of, score_all, summed


async def test_scores_are_those_of_the_function_called_directly():
    with pool_of("boxed", num_workers=2, correct_score=10.0) as pool:
        texts = [rf"\boxed{{{number}/2}}" for number in range(40)]
        rewards = await score_all(pool, *texts, answer="3.5")
        assert rewards == [Reward(10.0 * (number == 7), True, number == 7) for number in range(40)]
        bomb = await all_scored(pool, r"\boxed{9^{9^{9}}}", r"\boxed{10000000!}", answer="7")
        assert [(summed(scored), scored.failure) for scored in bomb] == [(Reward(0.0, True, False), None)] * 2


async def test_without_functions_all_rewards_are_zero():
    with pool_of() as pool:
        assert len(pool) == 0 and await score_all(pool, "3", "4", answer="3") == [Reward(0.0, False, None)] * 2


async def test_several_functions_are_summed_and_must_all_agree(module):
    functions = [{"name": f"{module}:{name}", "judges_answer": True} for name in ("act", "second")]
    with pool_of(*functions, correct_score=2.0) as pool:
        assert await score_all(pool, "answer", "ill") == [Reward(2.25, True, True), Reward(2.25, False, False)]


OPINIONS = """
def steps(record, num_tokens, truncated, *, per_level=1.0):
    return None if truncated else per_level * record["level"] - num_tokens

def reward_fn(messages, answer):
    return messages[-1]["content"] == answer and messages[0]["role"] == "user"
"""


WRITING = """
def first(record, messages, prompt_messages, answer, *, words):
    record["level"] += 1
    messages[0]["content"] = prompt_messages[0]["content"] = "changed"
    answer.append("changed")
    words.append("more")
    return float(len(words))

def second(record, messages, prompt_messages, answer):
    return record["level"] + len(answer) / 10 + (messages[0]["content"] == prompt_messages[0]["content"] == "2 + 3?")
"""


async def test_a_function_that_writes_into_its_arguments_changes_no_other_score(tmp_path, monkeypatch):
    (tmp_path / "writing.py").write_text(WRITING)
    monkeypatch.chdir(tmp_path)
    functions = ({"name": "writing.py:first", "kwargs": {"words": ["one"]}}, {"name": "writing.py:second"})
    sample = Sample("5", ["5"], ({"role": "user", "content": "2 + 3?"},), {"level": 3})
    with pool_of(*functions) as pool:
        for _ in range(2):
            scored = await pool.score(sample)
            assert scored.reward is not None
            assert scored.reward.scores == {"first": 2.0, "second": pytest.approx(4.1)}


async def test_functions_of_a_file_see_the_sample_and_are_weighed(tmp_path, monkeypatch):
    (tmp_path / "opinions.py").write_text(OPINIONS)
    monkeypatch.chdir(tmp_path)
    functions = (
        {"name": "opinions.py:steps", "weight": 0.5, "kwargs": {"per_level": 4}},
        {"name": "opinions.py:reward_fn", "judges_answer": True},
    )
    sample = Sample("5", "5", ({"role": "user", "content": "2 + 3?"},), {"level": 3}, num_tokens=2)

    async def score(pool):
        return await asyncio.gather(pool.score(sample), pool.score(replace(sample, finish_reason="length", answer="6")))

    with pool_of(*functions) as pool:
        both, one = await score(pool)
    assert both.reward == Reward(0.5 * (4 * 3 - 2) + 1.0, True, True, {"steps": 10.0, "reward_fn": 1.0})
    assert one.reward == Reward(0.0, True, False, {"steps": None, "reward_fn": 0.0})


PAID_FOR_WRONG = """
def exact(completion_text, answer):
    return float(completion_text == answer)

def brevity(num_tokens):
    return 1 / (1 + num_tokens)
"""


async def test_a_paid_wrong_answer_is_not_right(tmp_path, monkeypatch):
    (tmp_path / "rew.py").write_text(PAID_FOR_WRONG)
    monkeypatch.chdir(tmp_path)
    brevity = {"name": "rew.py:brevity", "weight": 0.2}
    for exact, verdicts in (
        ("rew.py:exact", [None, None]),
        ({"name": "rew.py:exact", "judges_answer": True}, [True, False]),
    ):
        with pool_of(exact, brevity) as pool:
            rewards = await score_all(pool, "5", "6", answer="5")
        assert [(r.score, r.answer_correct) for r in rewards] == list(zip([1.2, 0.2], verdicts, strict=True))


async def test_a_message_that_json_cannot_hold_fails_its_sample_alone(tmp_path, monkeypatch):
    (tmp_path / "opinions.py").write_text(OPINIONS)
    monkeypatch.chdir(tmp_path)
    sound = Sample("5", "5", ({"role": "user", "content": "2 + 3?"},))
    image = replace(sound, prompt_messages=({"role": "user", "content": object()},))

    async def score(pool):
        return [await pool.score(sample) for sample in (sound, image, sound)]

    with pool_of("opinions.py:reward_fn") as pool:
        first, failed, again = await score(pool)
    assert failed.failure == "error" and "cannot be sent to the reward process" in failed.detail
    assert first == again and first.reward.score == 1.0 and first.failure is None


@pytest.mark.parametrize(
    "text",
    [
        "raise it",
        "exit",
        "die",
        "crash",
        "fill",
        "return Reward(float('nan'), True, True)",
        "return Reward(float('inf'), True, True)",
        "return Reward('1', True, True)",
        "return Reward(10 ** 400, True, True)",
        "return Reward(1e300, True, True)",
        "return Reward(-1.1e6, True, True)",
        "return Reward(True, True, True)",
        "return Reward(None, True, True)",
        "return Reward(1j, True, True)",
        "return Reward(1.0, 'False', True)",
        "return Reward(1.0, True, None)",
        "return [1.0]",
        "return float('nan')",
        "return {'score': 1.0}",
    ],
)
async def test_a_failure_is_told_and_scores_zero(module, text):
    with pool_of(f"{module}:act") as pool:
        failed, right = await all_scored(pool, text, "answer")
        assert (summed(failed), failed.failure) == (ZERO, "error")
        assert failed.detail.startswith(f"{module}:act: ")
        assert summed(right) == Reward(1.0, True, True)


async def test_numbers_of_other_types_are_scores(module):
    with pool_of(f"{module}:act") as pool:
        texts = (
            "return Reward(__import__('numpy').float32(0.5), __import__('numpy').bool_(True), 0)",
            "return Reward(__import__('fractions').Fraction(1, 2), 1, False)",
            "return Reward(1e6, True, True)",
        )
        expected = [Reward(0.5, True, False), Reward(0.5, True, False), Reward(1e6, True, True)]
        assert await score_all(pool, *texts) == expected


async def test_a_text_that_is_no_unicode_is_scored_as_it_is(module):
    with pool_of(f"{module}:act") as pool:
        [scored] = await score_all(pool, "\ud800 \x00 \U0001f600", answer="\ud800 \x00 \U0001f600")
        assert scored == Reward(1.0, True, True)


async def test_the_first_failure_of_each_kind_is_noticed_with_an_example(module):
    notices = []
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0, notice=notices.append) as pool:
        failures = await failures_of(pool, "raise first", "raise second", "sleep 60", "raise third")
        assert failures == ["error", "error", "timeout", "error"]
    error, timeout = notices
    assert "reward/errors" in error and "ValueError: first" in error and "in act" in error
    assert "reward/timeouts" in timeout and "reward.wall_timeout_seconds = 1" in timeout


async def test_workers_run_at_once_one_completion_each_and_stay(module, tmp_path):
    with pool_of(f"{module}:act", num_workers=2) as pool:
        one, other = tmp_path / "one", tmp_path / "other"
        met = await score_all(pool, f"meet {one} {other}", f"meet {other} {one}")
        assert met == [Reward(1.0, True, False)] * 2
        started = time.monotonic()
        await score_all(pool, *["sleep 0.25"] * 4)
        assert time.monotonic() - started >= 0.5
        pids = {reward.score for _ in range(5) for reward in await score_all(pool, "pid", "pid")}
        assert 1 <= len(pids) <= 2


async def test_the_event_loop_stays_free(module, tmp_path):
    async def meet(pool):
        scoring = asyncio.ensure_future(pool.score(Sample(f"meet {tmp_path / 'one'} {tmp_path / 'other'}", "answer")))
        while not (tmp_path / "one").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "other").touch()
        return await scoring

    with pool_of(f"{module}:act") as pool:
        assert (await meet(pool)).failure is None


async def test_unknown_and_unimportable_functions_are_errors_of_the_recipe():
    with pool_of("boxd") as pool, pytest.raises(ConfigError, match="Did you mean 'boxed'"):
        await score_all(pool, "any")
    with pool_of("no_such_module_anywhere:score") as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot import no_such_module_anywhere"):
                await score_all(pool, "any")


async def test_ten_thousand_scorings_leave_nothing_behind():
    functions = ["gsm8k", "multiple_choice", {"name": "length", "kwargs": {"target": 9}}]
    texts = [f"So #### 7 or \\boxed{{{number}}}" for number in range(2000)]
    sizes = []
    with pool_of(*functions, {"name": "format", "kwargs": {"form": "boxed"}}) as pool:

        async def score(text):
            return (await pool.score(Sample(text, "7", record={"choices": list("6789")}, num_tokens=5))).failure

        async def all_of():
            return await asyncio.gather(*map(score, texts))

        for _ in range(5):
            assert not any(await all_of())
            processes = [Path(f"/proc/{pid}") for pid in descendants(os.getpid())]
            pages = sum(int((process / "statm").read_text().split()[1]) for process in processes)
            sizes.append((pages, sum(len(list((process / "fd").iterdir())) for process in processes)))
    (before, opened), *_, (after, opened_after) = sizes
    # One that is just being opened or closed is nothing left behind by 8,000 scorings.
    assert opened_after < opened + 8 and (after - before) * resource.getpagesize() < 4 << 20
