"""Rewards of servers: a judge and a reward model on this machine, with faults of every kind, counted exactly."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from megarl.config import RewardConfig
from megarl.config.sections.rewards import RewardFunctionConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.http_rewards import COUNTED_FOR, make_server_client
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from megarl.types import ConfigError
from tests.rewards.servers import JudgeServer

QUESTION = ({"role": "user", "content": "What is 6 x 7?"},)


def sample(number, answer="42", **record):
    return Sample(f"<think>secret</think>solution {number} {{{{answer}}}}", answer, QUESTION, record)


@contextlib.asynccontextmanager
async def pool_of(url, *further, name="judge", on_failure="zero", notice=lambda text: None, **kwargs):
    kwargs = {"url": f"{url}/v1", "model": "m", "pause_seconds": 0.0, **kwargs}
    rewards = {"functions": [{"name": name, "kwargs": kwargs}, *further], "on_failure": on_failure}
    pool = RewardPool(worker_settings(RewardConfig.model_validate(rewards)), num_workers=1, notice=notice)
    try:
        yield pool
    finally:
        await pool.aclose()


async def judged(server, samples, *further, **kwargs):
    """What a pool scores of these samples at a judge, and its metrics."""
    async with server.serving() as url, pool_of(url, *further, **kwargs) as pool:
        scored = await asyncio.gather(*map(pool.score, samples))
        return scored, pool.metrics(), pool.metrics()


async def test_errors_and_hangs_are_counted_exactly():
    """200 completions: of the first calls 5 % are errors, 5 % hang, 5 % are nonsense; three never get a score."""
    faults = {number: [500] for number in range(3, 200, 20)} | {number: ["hang"] for number in range(11, 200, 20)}
    faults |= {number: ["nonsense"] for number in range(17, 200, 20)}
    faults |= {43: [503, "drop"], 51: ["hang", "hang"], 57: ["nonsense", "nonsense"]}
    notices = []
    server = JudgeServer(faults)
    samples = [sample(number) for number in range(200)]
    scored, metrics, after = await judged(server, samples, timeout_seconds=3.0, max_tries=2, notice=notices.append)
    assert {number: one.failure for number, one in enumerate(scored) if one.failure} == {
        43: "error", 51: "timeout", 57: "parse_error",
    }  # fmt: skip
    assert [one.reward.score for one in scored] == [1.0 if number % 2 == 0 else 0.0 for number in range(200)]
    prompt_tokens = sum(100 + number for number in range(200) if number not in (43, 51))
    prompt_tokens += sum(100 + number for number in faults if faults[number][0] == "nonsense")
    answered = 198 + 10
    assert metrics == {
        "reward/judge/calls": 230.0, "reward/judge/retries": 30.0, "reward/judge/errors": 11.0,
        "reward/judge/timeouts": 11.0, "reward/judge/parse_errors": 11.0, "reward/judge/cancelled": 0.0,
        "reward/judge/substituted": 0.0,
        "reward/judge/prompt_tokens": prompt_tokens, "reward/judge/completion_tokens": 7.0 * answered,
        "reward/judge/unmetered": 0.0,
    }  # fmt: skip
    assert server.counts["calls"] == 230 and server.counts["hang"] == 11 and server.counts["nonsense"] == 11
    assert not any(after.values())
    assert len(notices) == 3 and all("gets zero" in text for text in notices)


async def test_64_calls_are_in_flight():
    server = JudgeServer()
    server.waits_for = 64
    scored, metrics, _ = await judged(server, [sample(number) for number in range(100)])
    assert server.most_in_flight == 64 and metrics["reward/judge/calls"] == 100
    assert not any(one.failure for one in scored)


async def test_what_the_judge_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_JUDGE", "hidden")
    (tmp_path / "prompt.txt").write_text(
        '{"x": 1} {{question}}|{{ completion }}|{{answer}}|{{record.a.b}}|{{record.c}}'
    )
    server = JudgeServer()
    given = {
        "prompt": str(tmp_path / "prompt.txt"), "system": "Be strict.", "request": {"seed": 3},
        "api_key_env": "KEY_OF_A_JUDGE", "dollars_per_million": [2.0, 10.0], "max_tokens": 9,
    }  # fmt: skip
    one = sample(4, answer=["42", "forty-two"], a={"b": "{{question}}"}, c=7)
    _, metrics, _ = await judged(server, [one], **given)
    shown = '{"x": 1} What is 6 x 7?|solution 4 {{answer}}|["42", "forty-two"]|{{question}}|7'
    assert server.asked == [{
        "model": "m", "temperature": 0.0, "max_tokens": 9, "seed": 3,
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": shown},
        ],
    }]  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer hidden"
    assert metrics["reward/judge/dollars"] == pytest.approx((104 * 2 + 7 * 10) / 1e6)


async def test_the_judge_beside_functions():
    form = {"name": "format", "weight": 0.5, "kwargs": {"pattern": ".*solution [0-4].*"}}
    scored, *_ = await judged(JudgeServer(), [sample(4), sample(5)], form, correct_from=1.0)
    rewards = [one.reward for one in scored]
    assert [(r.score, r.format_valid, r.answer_correct) for r in rewards] == [(1.5, True, True), (0.0, False, False)]
    assert rewards[0].scores == {"format": 1.0, "judge": 1.0} and rewards[0].metrics == {"format/valid": 1.0}


async def test_a_failure_of_either_side_fails_the_completion():
    server = JudgeServer({4: [400, 400]})
    broken = {"name": "length", "kwargs": {"field": "budget"}}
    scored, metrics, _ = await judged(server, [sample(4, budget=3), sample(6)], broken, on_failure="leave_out")
    assert [one.failure for one in scored] == ["error", "error"]
    assert "HTTP 400" in scored[0].detail and "budget" in scored[1].detail
    assert [one.trajectory_reward for one in scored] == [None, None]
    assert metrics["reward/judge/retries"] == 0


async def test_nonsense_is_left_out_or_scored_by_policy():
    server = JudgeServer({1: ["nonsense"] * 9})
    [left_out], *_ = await judged(server, [sample(1)], on_failure="leave_out")
    assert left_out.failure == "parse_error" and left_out.trajectory_reward is None
    notices = []
    server = JudgeServer({number: ["nonsense"] * 9 for number in (1, 2)})
    [given, _], metrics, _ = await judged(server, [sample(1), sample(2)], parse_error_score=0.25, notice=notices.append)
    assert given.failure is None and given.reward.score == 0.25
    assert metrics["reward/judge/parse_errors"] == 6 and metrics["reward/judge/substituted"] == 2
    assert len(notices) == 1 and "parse_error_score = 0.25" in notices[0] and "Who can tell?" in notices[0]


async def test_what_cannot_be_sent_is_no_answer_without_a_score(monkeypatch):
    """A header that the client refuses gets no completion the score of nonsense."""
    [scored], metrics, _ = await judged(JudgeServer(), [sample(2)], parse_error_score=0.0, headers={"X": "a\nb"})
    assert scored.failure == "error" and metrics["reward/judge/parse_errors"] == 0
    assert metrics["reward/judge/errors"] == metrics["reward/judge/calls"] == 3
    monkeypatch.setenv("KEY_OF_A_JUDGE", "hidden\n")
    server = JudgeServer()
    [scored], *_ = await judged(server, [sample(2)], api_key_env="KEY_OF_A_JUDGE", headers={"X-Own": "yes"})
    assert scored.reward.score == 1.0 and server.headers[0]["Authorization"] == "Bearer hidden"
    assert server.headers[0]["X-Own"] == "yes"
    monkeypatch.setenv("KEY_OF_A_JUDGE", "hid\nden")
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        judge(api_key_env="KEY_OF_A_JUDGE")
    assert "hid" not in str(caught.value).replace("KEY_OF_A_JUDGE", "")


async def test_what_is_scored_after_the_end_is_an_error():
    async def late():
        async with JudgeServer().serving() as url, pool_of(url, max_tries=1) as pool:
            await pool.aclose()
            return await pool.score(sample(2))

    scored = await late()
    assert scored.failure == "error" and "closed" in scored.detail


async def test_calls_of_an_evaluation_are_counted_apart():
    async def both():
        async with JudgeServer().serving() as url, pool_of(url) as pool:
            training = asyncio.create_task(pool.score(sample(0)))
            token = COUNTED_FOR.set("evaluation")
            await asyncio.gather(training, pool.score(sample(2)), pool.score(sample(4)))
            evaluated = pool.metrics()
            COUNTED_FOR.reset(token)
            return evaluated, pool.metrics()

    evaluated, trained = await both()
    assert (evaluated["reward/judge/calls"], trained["reward/judge/calls"]) == (2, 1)


def test_thoughts_that_do_not_end_are_hidden_and_long_completions_are_cut():
    shown = [
        judge(**given).request(Sample(text, "42", QUESTION))["messages"][-1]["content"]
        for given, text in (
            ({}, "<think>secret"), ({}, "<think>secret</think>open"), ({"thoughts": "show"}, "<think>secret"),
            ({"max_shown_characters": 3}, "secret end"),
        )
    ]  # fmt: skip
    assert ["secret" in text for text in shown] == [False, False, True, False]
    assert "open" in shown[1] and "\nend\n" in shown[3]
    bare = judge(temperature=None, max_tokens=None).request(sample(1))
    assert bare.keys() == {"model", "messages"}


def test_a_pattern_that_takes_for_ever_reads_nothing():
    with pytest.raises(ValueError, match=r"kwargs\.pattern: matching"):
        judge(pattern=r"(a|aa)+$").verdict("a" * 200 + "b")


@pytest.mark.parametrize(
    ("given", "asked", "shown"),
    [
        ({"url": "http://me:pass@h:1/v1?v=2"}, "http://me:pass@h:1/v1/chat/completions?v=2", "http://h:1"),
        ({"url": "http://h:1/v1/chat/completions/"}, "http://h:1/v1/chat/completions", "http://h:1"),
    ],
)
def test_addresses(given, asked, shown):
    made = judge(**given)
    assert (made._url, made._shown_url) == (asked, shown)


def test_a_huge_number_is_no_score():
    read = make_server_client(
        RewardFunctionConfig.model_validate({"name": "remote", "kwargs": {"url": "http://127.0.0.1:9"}})
    )._score_answer
    for answer in (10**400, {"score": 10**400}, [[]]):
        assert read(answer).kind == "parse_error"
    said = {"choices": [{"message": {"content": "CORRECT"}}], "usage": {"prompt_tokens": 10**400}}
    assert judge()._score_answer(said).score == 1.0


async def test_a_cancelled_completion_ends_its_call():
    async def cancel():
        server = JudgeServer({0: ["hang"]})
        async with server.serving() as url, pool_of(url) as pool:
            task = asyncio.create_task(pool.score(sample(0)))
            while not server.counts["hang"]:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return pool.metrics()

    metrics = await cancel()
    assert metrics["reward/judge/cancelled"] == metrics["reward/judge/calls"] == 1


def judge(**kwargs):
    given = {"url": "http://127.0.0.1:9/v1", "model": "m", **kwargs}
    return make_server_client(RewardFunctionConfig.model_validate({"name": "judge", "kwargs": given}))


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("CORRECT", 1.0),
        ("Because.\n\n**Verdict:** [[incorrect]].\n", 0.0),
        ("Final verdict: `CORRECT`", 1.0),
        ("CORRECT\nor not", None),
        ("It is not CORRECT", None),
        ("The answer is not: CORRECT", None),
        ("The final answer: CORRECT", 1.0),
        ("CORRECT INCORRECT", None),
        ("", None),
    ],
)
def test_verdicts(said, score):
    if score is None:
        with pytest.raises(ValueError, match="no verdict"):
            judge().verdict(said)
    else:
        assert judge().verdict(said) == score


@pytest.mark.parametrize("said", ["Rating: 7", '{"grade": "A"}'])
def test_a_verdict_of_a_cut_answer_is_none(said):
    rated = judge(scale=[0, 100]) if "Rating" in said else judge(pattern=r'"grade": "(\w+)"', choices={"A": 1, "B": 0})
    answer = {"choices": [{"message": {"content": said}, "finish_reason": "length"}]}
    with pytest.raises(ValueError, match="cut off"):
        rated.read(answer)
    for finish_reason in ("stop", None):
        answer["choices"][0]["finish_reason"] = finish_reason
        assert rated.read(answer) == (0.07 if "Rating" in said else 1.0)


def test_a_judge_cut_in_its_thoughts_is_told_its_limit():
    answer = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    with pytest.raises(ValueError, match=r"max_tokens = 1024\); give a higher limit"):
        judge().read(answer)
    with pytest.raises(ValueError, match=r"max_tokens = null\); give a higher limit"):
        judge(max_tokens=None).read(answer)


def test_verdicts_by_number_and_by_pattern():
    rated = judge(scale=[1, 10])
    assert rated.verdict("Rating: 10") == 1.0 and rated.verdict("5.5") == 0.5
    for wrong in ("11", "ten", "7/10", "-1"):
        with pytest.raises(ValueError, match="verdict"):
            rated.verdict(wrong)
    found = judge(pattern=r'"grade": "(\w+)"', choices={"A": 1, "B": 0.5, "C": 0})
    assert found.verdict('{"grade": "A"} no: {"grade": "b"}') == 0.5
    with pytest.raises(ValueError, match="none of A, B, C"):
        found.verdict('{"grade": "D"}')


@pytest.mark.parametrize(
    ("given", "error_text"),
    [
        pytest.param({"url": "localhost"}, r"kwargs\.url = 'localhost': is not a valid address", id="address"),
        pytest.param({"modle": "m"}, r"kwargs\.modle", id="unknown"),
        pytest.param({"choices": {"A": 1}}, "two verdicts", id="one verdict"),
        pytest.param({"scale": [5, 1]}, "lowest and the highest", id="scale"),
        pytest.param({"pattern": "("}, "not a regular expression", id="pattern"),
        pytest.param({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE", id="key"),
        pytest.param({"prompt": "no/such/file"}, r"kwargs\.prompt = no/such/file", id="no prompt"),
        pytest.param({"prompt": "unknown.txt"}, "{{golden}}", id="placeholder"),
        pytest.param({"prompt": "blind.txt"}, "lacks {{completion}}", id="blind"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, monkeypatch, given, error_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unknown.txt").write_text("{{completion}} {{golden}}")
    (tmp_path / "blind.txt").write_text("{{answer}}")
    with pytest.raises(ConfigError, match=r"reward\.functions: 'judge'") as caught:
        judge(**given)
    assert error_text.replace("\\", "") in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "path", "answer", "asked"),
    [
        ("slime", "/", 0.75, {"response": "solution 1 {{answer}}", "label": "42"}),
        ("slime", "/", {"score": 0.75}, {"prompt": "What is 6 x 7?"}),
        ("openrlhf", "/get_reward", {"rewards": [0.75]}, {"prompts": ["What is 6 x 7?"], "labels": ["42"]}),
        ("openrlhf", "/get_reward", {"rewards": [0.75], "scores": [1.0], "extra_logs": {}}, {"labels": ["42"]}),
        ("vllm", "/pooling", [0.75], {"model": "m"}),
        ("vllm", "/pooling", {"data": [{"data": [[0.5], [0.75]]}]}, {"model": "m", "add_generation_prompt": False}),
    ],
)
async def test_a_reward_model_by_http(protocol, path, answer, asked):
    requests = []

    async def reply(request):
        requests.append(await request.json())
        return web.json_response(answer if len(requests) > 1 else {"data": "nonsense"})

    async def score():
        async with JudgeServer().serving(path, reply) as url:
            place = "/v1" if answer == [0.75] else path.rstrip("/")
            kwargs = {"url": url + place, "protocol": protocol, "pause_seconds": 0.0}
            kwargs |= {"model": "m"} if protocol == "vllm" else {}
            rewards = {"functions": [{"name": "remote.own", "kwargs": kwargs}]}
            pool = RewardPool(worker_settings(RewardConfig.model_validate(rewards)), num_workers=1)
            plain = Sample("solution 1 {{answer}}", "42", QUESTION)
            try:
                return await pool.score(plain), pool.metrics()
            finally:
                await pool.aclose()

    scored, metrics = await score()
    assert scored.failure is None and scored.reward.score == 0.75 and scored.reward.scores == {"remote.own": 0.75}
    assert {name: requests[-1][name] for name in asked} == asked
    assert metrics["reward/remote.own/parse_errors"] == 1 and metrics["reward/remote.own/calls"] == 2


@pytest.mark.parametrize(
    ("protocol", "path", "text", "error"),
    [
        ("slime", "/", '{"score": 0.25, "score": 0.75}', 'the key "score" occurs twice'),
        ("slime", "/", '{"score": 0.25, "reward": 0.75}', "no score"),
        ("slime", "/", "[0.25, 0.75]", "no score"),
        ("openrlhf", "/get_reward", '{"rewards": [0.25, 0.75]}', "no score"),
        ("vllm", "/pooling", '{"data": [0.25], "data": [0.75]}', 'the key "data" occurs twice'),
        ("slime", "/", '{"score": NaN}', "no score"),
    ],
)
async def test_an_answer_with_two_scores_has_none(protocol, path, text, error):
    async def reply(request):
        return web.Response(text=text, content_type="application/json")

    async with JudgeServer().serving(path, reply) as url:
        kwargs = {"url": url + path.removesuffix("/pooling"), "protocol": protocol}
        kwargs |= {"pause_seconds": 0.0, "max_tries": 1}
        kwargs |= {"model": "m"} if protocol == "vllm" else {}
        rewards = {"functions": [{"name": "remote.own", "kwargs": kwargs}]}
        pool = RewardPool(worker_settings(RewardConfig.model_validate(rewards)), num_workers=1)
        try:
            scored = await pool.score(Sample("solution 1", "42", QUESTION))
            assert scored.failure is not None and not scored.reward.scores
            assert "remote.own" in scored.detail and error in scored.detail
        finally:
            await pool.aclose()
