"""The endpoint before a real engine, driven by the openai client as it is installed."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from megarl.processes.open_files import allow_open_files
from megarl.rollout.pool import EnginePool
from megarl.rollout.stitch import stitch
from megarl.serving.body import MAX_BODY_BYTES
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.types import ConfigError, Request
from tests.rollout.engines import CONTEXT_TOKENS
from tests.serving.served import ONE, SAMPLING
from tests.serving.tool_model import LOOP

LIMITS = Limits(CONTEXT_TOKENS, max_calls=40, idle_seconds=60.0)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION = {"role": "user", "content": "Add 2 and 3."}


async def with_tools(client: AsyncOpenAI, num_turns: int = 4, *, streams: bool = False) -> tuple[list[Any], int]:
    """Chat until the model answered in words after it had called a tool; the messages, and the proper calls."""
    messages: list[Any] = [QUESTION]
    num_calls = 0
    for _ in range(num_turns):
        asked: Any = {"model": "policy", "messages": messages, "tools": [ADD]}
        try:
            if streams:
                async with client.chat.completions.stream(**asked) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
        except openai.LengthFinishReasonError as error:  # the client's own, of a stream that was cut
            answer = error.completion
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            break
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            if num_calls:
                break
            messages.append({"role": "user", "content": "Add."})
        for call in message.tool_calls or ():
            try:
                result = str(sum(json.loads(call.function.arguments).values()))  # type: ignore[union-attr]
                num_calls += 1
            except json.JSONDecodeError as error:
                result = f"no JSON: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages, num_calls


async def test_sixty_four_agents_with_tools_are_recorded_as_they_were_sampled(served: Any) -> None:
    """Ids and log-probs are those of direct calls; each session is one segment, however often it called a tool."""
    async with served() as s:
        sessions = [s.open(seed=f"{n}") for n in range(64)]

        async def agent(number: int, session: Session) -> tuple[list[Any], int]:
            async with s.client(session) as client:
                return await with_tools(client, streams=number % 2 == 1)

        talks = await asyncio.gather(*(agent(number, session) for number, session in enumerate(sessions)))
        assert sum(num_calls for _, num_calls in talks) >= 48
        sent = {name: (prompt, seed) for name, prompt, seed in await s.requests()}
        pool = EnginePool(s.group, ONE, max_running=32)
        for session, (messages, _) in zip(sessions, talks, strict=True):
            assert len(session.answers) == sum(m["role"] == "assistant" for m in messages)
            end = 0
            names = [f"{session.name}.{answer.number}" for answer in session.answers]
            requests = [Request(name, np.array(sent[name][0], np.int32), SAMPLING, sent[name][1]) for name in names]
            directly = await asyncio.gather(*map(pool.generate, requests))
            for answer, request, direct in zip(session.answers, requests, directly, strict=True):
                prompt, known = request.prompt_token_ids.tolist(), answer.call.completion
                assert answer.call.prompt_token_ids.tolist() == prompt and len(prompt) > end
                assert direct.token_ids.tolist() == known.token_ids.tolist()
                # Another company in the engine rounds otherwise; a float's step at this model's logits of 20 is 2e-6.
                np.testing.assert_allclose(direct.rollout_logprobs, known.rollout_logprobs, atol=1e-5)
                end = len(answer.call.token_ids)
            [segment] = stitch([answer.call for answer in session.answers])
            assert int(segment.loss_mask.sum()) == sum(len(a.call.completion.token_ids) for a in session.answers)
            assert session.counts["forks"] == 0


async def test_a_stream_is_the_answer_in_chunks(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.serving.answer_sender.KEEP_ALIVE_SECONDS", 0.01)
    async with served() as s:
        for n in range(6):
            whole, streamed = s.open(seed=f"{n}"), s.open(seed=f"{n}")
            asked: Any = {"model": "policy", "messages": [QUESTION], "tools": [ADD]}
            async with s.client(whole) as client:
                expected = (await client.chat.completions.create(**asked, logprobs=True)).choices[0]
            async with s.client(streamed) as client, client.chat.completions.stream(**asked) as stream:
                found = (await stream.get_final_completion()).choices[0]
            assert found.finish_reason == expected.finish_reason
            assert (found.message.content or "") == (expected.message.content or "")
            calls = [[c.function for c in m.message.tool_calls or ()] for m in (found, expected)]
            assert [(c.name, c.arguments) for c in calls[0]] == [(c.name, c.arguments) for c in calls[1]]
            [answer] = whole.answers
            content = expected.logprobs.content
            np.testing.assert_allclose(
                [token.logprob for token in content], answer.call.completion.rollout_logprobs, rtol=1e-6
            )
        async with s.client(s.open()) as client:
            body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 200, "stream": True}
            chunks = [c async for c in await client.completions.create(**body, stream_options={"include_usage": True})]
            assert "".join(c.choices[0].text for c in chunks[:-1]) == LOOP * 200
            assert chunks[-1].usage.completion_tokens == 200 and chunks[-2].choices[0].finish_reason == "length"
            # While it lasts, comments keep the connection alive.
            async with aiohttp.ClientSession() as http:
                url = f"{s.endpoint.url_of(s.open())}/completions"
                async with http.post(url, json=body) as response:
                    text = (await response.read()).decode()
        assert ": keep-alive\n\n" in text and text.endswith("data: [DONE]\n\n")


async def test_a_retry_joins_its_call_and_the_same_body_unmarked_is_a_new_sample(served: Any) -> None:
    async with served() as s:
        session = s.open()
        body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 150}
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        async with s.client(session) as client:
            first = asyncio.create_task(client.completions.create(**body))
            while not session.num_under_way:
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(first, client.completions.create(**body, **retry))
            answers.append(await client.completions.create(**body, **retry))
            assert {answer.choices[0].text for answer in answers} == {LOOP * 150}
            assert len(await s.requests()) == 1 and len(session.answers) == 1
            assert session.counts["joined_retries"] == 2
            await client.completions.create(**body)
        [(_, _, seed)] = await s.requests()
        assert len(session.answers) == 2 and session.answers[0].call.completion is not None
        assert seed != 0


async def test_a_client_s_retries_find_a_call_that_takes_longer_than_it_is_held(served: Any) -> None:
    async with served(hold_seconds=0.05) as s:
        session = s.open()
        async with s.client(session, max_retries=20) as client:
            answer = await client.completions.create(model="policy", prompt=f"The{LOOP}", max_tokens=200)
        assert answer.choices[0].text == LOOP * 200
        assert len(await s.requests()) == 1 and session.counts["joined_retries"] >= 1


async def test_a_changed_history_forks_and_an_equal_one_in_other_words_of_the_client_does_not(served: Any) -> None:
    async with served() as s:
        session = s.open(seed="2")
        async with s.client(session) as client:
            messages, num_calls = await with_tools(client, num_turns=1)
            assert num_calls == 1
            replayed = []
            for message in messages:
                changed = dict(message)
                if message["role"] == "assistant":
                    changed |= {"content": f" {message.get('content') or ''}\n", "audio": None}
                    calls = [dict(call) for call in message.get("tool_calls", ())]
                    for call in calls:
                        arguments = call["function"]["arguments"]
                        if not arguments.startswith("error"):
                            arguments = json.dumps(json.loads(arguments), indent=3)
                        call |= {"id": f"own_{call['id']}", "function": call["function"] | {"arguments": arguments}}
                    changed["tool_calls"] = calls
                if message["role"] == "tool":
                    changed["tool_call_id"] = f"own_{message['tool_call_id']}"
                replayed.append(changed)
            asked: Any = {"model": "policy", "tools": [ADD]}
            last = session.answers[-1].call.token_ids.tolist()
            await client.chat.completions.create(messages=[*replayed, QUESTION], **asked)
            assert session.counts["forks"] == 0
            assert session.answers[-1].call.prompt_token_ids.tolist()[: len(last)] == last
            before = len(session.answers)
            place = max(n for n, m in enumerate(replayed) if m["role"] == "assistant")
            replayed[place] = {"role": "assistant", "content": "Nine."}
            await client.chat.completions.create(messages=[*replayed[: place + 1], QUESTION], **asked)
            assert session.counts["forks"] == session.counts["forks/history"] == 1
            [text] = session.fork_texts
            assert f"message {place} (assistant)" in text and "Nine." in text
            assert any("sequence begins" in notice for notice in s.notices) and len(session.answers) == before + 1
            # Another system message, as one with a clock: a fork in the first message.
            clock = {"role": "system", "content": "It is 12:01."}
            await client.chat.completions.create(messages=[clock, QUESTION], model="policy")
            clock["content"] = "It is 12:02."
            await client.chat.completions.create(messages=[clock, QUESTION], model="policy")
            assert session.counts["forks/system"] == 1


async def test_a_client_that_goes_away_frees_its_slot_and_its_session_goes_on(served: Any) -> None:
    async with served() as s:
        session, before = s.open(), s.pool.load().num_sampled_tokens
        async with s.client(session) as client:
            first = (await client.chat.completions.create(model="policy", messages=[QUESTION])).choices[0].message  # type: ignore[list-item]
            body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 240, "stream": True}
            for streamed in (True, False):
                going = asyncio.create_task(client.completions.create(**(body | {"stream": streamed})))
                while not session.num_under_way:
                    await asyncio.sleep(0.01)
                going.cancel()
                await asyncio.gather(going, return_exceptions=True)
                while session.num_under_way:
                    await asyncio.sleep(0.01)
            await s.pool.wait_until_drained()
            assert await s.group.call("unfinished") == [0] and session.counts["abandoned_calls"] == 2
            # Tokens of aborted calls count towards the limit of an attempt.
            assert session._sampler.num_sampled == s.pool.load().num_sampled_tokens - before
            history = [QUESTION, {"role": "assistant", "content": first.content}, QUESTION]
            await client.chat.completions.create(model="policy", messages=history)  # type: ignore[arg-type]
        one, two = session.answers
        assert two.call.prompt_token_ids.tolist()[: len(one.call.token_ids)] == one.call.token_ids.tolist()
        assert session.counts["forks"] == 0


async def test_a_session_without_calls_is_ended_by_its_time(served: Any) -> None:
    async with served() as s:
        session = s.open(idle_seconds=0.2)
        await asyncio.wait_for(session.ended.wait(), 120)
        assert session.counts["timed_out"] == 1


async def test_late_calls_of_an_ended_session_are_told_so_once(served: Any) -> None:
    async with served() as s:
        session, other = s.open(), s.open()
        async with (
            s.client(session, max_retries=5) as client,
            s.client(other) as neighbour,
            aiohttp.ClientSession() as h,
        ):
            url = f"{s.endpoint.base_url}/sessions/{session.secret}/reward"
            for wrong in ({}, {"reward": "good"}, {"reward": True}, {"reward": 10**400}):
                async with h.post(url, json=wrong) as response:
                    assert response.status == 400
            body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 240}
            late = asyncio.create_task(client.completions.create(**body))
            beside = asyncio.create_task(neighbour.completions.create(**body))
            # Nothing else is awaited before the reward: on a loaded machine the answer would come first.
            while not (session.num_under_way and other.num_under_way):
                await asyncio.sleep(0.01)
            async with h.post(url, json={"reward": 0.5}) as response:
                assert response.status == 200 and session.reward == 0.5
            with pytest.raises(openai.APIStatusError) as gone:
                await late
            assert gone.value.status_code == 410 and gone.value.code == "session_ended"
            with pytest.raises(openai.APIStatusError) as again:
                await client.completions.create(**body)
            assert again.value.status_code == 410 and again.value.response.headers["x-should-retry"] == "false"
            async with h.post(url, json={"reward": 0.9}) as response:
                assert response.status == 410 and session.reward == 0.5
            assert (await beside).choices[0].text == LOOP * 240
        # The late call may have ended before an engine saw it; neither it nor the one after it was sent again.
        assert len(await s.requests()) in (1, 2)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 3}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "."}]}, "messages.0.role"),
    ({"messages": [QUESTION, {"role": "assistant", "content": "I"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "."}}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "messages"),
    ({"tools": 5}, "tools"),
    ({"function_call": {"name": "add"}}, "function_call"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    ({"bad_words": ["yes"]}, "bad_words"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"max_completion_tokens": 5, "max_tokens": "all"}, "max_tokens"),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": None, "function_call": {"name": "f"}}, QUESTION]},
        "messages.1.function_call",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages.0.content"),
]


async def test_what_cannot_be_served_is_refused_by_its_name(served: Any) -> None:
    async with served() as s:
        session = s.open()
        async with aiohttp.ClientSession() as http:
            url = f"{s.endpoint.url_of(session)}/chat/completions"
            for change, param in REFUSED:
                async with http.post(url, json={"model": "policy", "messages": [QUESTION]} | change) as response:
                    error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, param), error
            for raw in (b"{", b"[]", b"\xff"):
                async with http.post(url, data=raw) as response:
                    assert response.status == 400
        assert await s.requests() == [] and session.answers == []


async def test_the_recipe_s_sampling_holds_and_what_a_client_sets_is_counted(served: Any) -> None:
    async with served() as s:
        session, plain = s.open(), s.open()
        asked: Any = {"messages": [QUESTION]}
        own: Any = {"temperature": 0.1, "top_p": 0.5, "seed": 7, "extra_body": {"min_p": 0.2, "repetition_penalty": 2}}
        for client_of, more in ((session, own), (plain, {})):
            async with s.client(client_of) as client:
                await client.chat.completions.create(model="gpt-x" if more else "policy", **asked, **more)
        one, two = session.answers[0].call.completion, plain.answers[0].call.completion
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert session.counts["overridden_fields"] == 6 and plain.counts["overridden_fields"] == 0
        assert len(s.notices) == 6 and all("recipe's value holds" in text for text in s.notices)


async def test_fields_without_effect_are_counted_and_others_are_silent(served: Any) -> None:
    without_effect = {"reasoning_effort": "high", "parallel_tool_calls": False, "dry_multiplier": 0.8}
    silent = {"user": "me", "store": False, "parallel_tool_calls": True, "stop_token_ids": [], "max_tokens": 3}
    async with served() as s, aiohttp.ClientSession() as http:
        for fields, num_counted in ((without_effect, 3), (silent, 0)):
            session = s.open()
            for page, prompt in (("chat/completions", {"messages": [QUESTION]}), ("completions", {"prompt": "The"})):
                before = session.counts["overridden_fields"]
                body = {"model": "policy", "max_tokens": 3, "logprobs": 0 if page == "completions" else None}
                async with http.post(f"{s.endpoint.url_of(session)}/{page}", json=body | prompt | fields) as response:
                    answer = await response.json()
                assert response.status == 200, answer
                assert session.counts["overridden_fields"] - before == num_counted
                assert (answer["choices"][0]["logprobs"] is not None) == (page == "completions")
        assert sorted(text.split(" = ")[0].split()[-1] for text in s.notices) == sorted(without_effect)


async def test_names_that_the_template_does_not_write_are_left_out_and_reported(served: Any) -> None:
    async with served() as s, aiohttp.ClientSession() as http:
        session, plain = s.open(), s.open()
        for client_of, name in ((session, {"name": "Ada"}), (session, {"name": "Bo"}), (plain, {})):
            url = f"{s.endpoint.url_of(client_of)}/chat/completions"
            body = {"model": "policy", "max_tokens": 3, "messages": [QUESTION | name]}
            async with http.post(url, json=body) as response:
                assert response.status == 200, await response.json()
        prompts = [answer.call.prompt_token_ids.tolist() for answer in (*session.answers, *plain.answers)]
        assert prompts == [prompts[0]] * 3
        assert (session.counts["overridden_fields"], plain.counts["overridden_fields"]) == (2, 0)
        assert len(s.notices) == 1 and "messages.name = 'Ada'" in s.notices[0]


async def test_a_prompt_longer_than_the_context_is_refused_and_its_neighbours_go_on(served: Any) -> None:
    async with served() as s:
        session, other = s.open(), s.open()
        async with s.client(session) as client, s.client(other) as neighbour:
            beside = asyncio.create_task(
                neighbour.completions.create(model="policy", prompt=f"The{LOOP}", max_tokens=24)
            )
            for num_words in (CONTEXT_TOKENS, 10_000):
                long: Any = [{"role": "user", "content": "number " * num_words}]
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(model="policy", messages=long)
                assert error.value.code == "context_length_exceeded"
            assert (await beside).choices[0].text == LOOP * 24
            # The last tokens of room are given, then none.
            tokens = [5] * (CONTEXT_TOKENS - 3)
            answer = await client.completions.create(model="policy", prompt=tokens)
            assert answer.usage is not None and answer.usage.completion_tokens <= 3
            with pytest.raises(openai.BadRequestError, match="vocabulary"):
                await client.completions.create(model="policy", prompt=[10**6])


async def test_who_has_no_session_or_a_wrong_key_is_told_so(served: Any) -> None:
    async with served(token="token") as s:
        session = s.open()
        for url, key, code in (
            (f"{s.endpoint.base_url}/v1", session.secret, None),
            (s.endpoint.url_of(session), "whatever", None),
            (f"{s.endpoint.base_url}/v1", "token", "no_session"),
            (f"{s.endpoint.base_url}/v1", "wrong", "invalid_api_key"),
            (f"{s.endpoint.base_url}/s/wrong/v1", session.secret, "invalid_api_key"),
        ):
            async with AsyncOpenAI(base_url=url, api_key=key) as client:
                if code is None:
                    assert [model.id async for model in client.models.list()] == ["policy"]
                    await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
                    continue
                with pytest.raises(openai.AuthenticationError) as error:
                    await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
                assert error.value.code == code
        assert len(session.answers) == 2


async def test_a_huge_body_is_refused_before_it_is_read(served: Any) -> None:
    async with served() as s:
        session = s.open()
        async with s.client(session, max_retries=2) as client:
            with pytest.raises(openai.APIStatusError) as error:
                huge: Any = [{"role": "user", "content": "x" * 3 * MAX_BODY_BYTES}]
                await client.chat.completions.create(model="policy", messages=huge)
            assert error.value.status_code == 413
            await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]


async def test_connections_beyond_the_limit_are_turned_away_and_sessions_go_on(served: Any) -> None:
    async with served(max_connections=3) as s:
        session = s.open()
        body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 100}
        url = f"{s.endpoint.url_of(session)}/models"
        async with s.client(session) as client, aiohttp.ClientSession() as http:
            running = asyncio.create_task(client.completions.create(**body))
            while not session.num_under_way:
                await asyncio.sleep(0.01)

            async def status() -> int:
                async with http.get(url, headers={"Connection": "close"}) as response:
                    return response.status

            async with aiohttp.ClientSession() as kept:
                # At once: one after the other would share a connection.
                held = await asyncio.gather(*(kept.get(url) for _ in range(2)))
                assert [response.status for response in held] == [200, 200]
                others = await asyncio.gather(*(status() for _ in range(40)))
                assert others.count(503) >= 38
                assert (await running).choices[0].text == LOOP * 100
                for response in held:
                    await response.release()
            assert (await client.completions.create(**body)).choices[0].text == LOOP * 100


async def test_strangers_do_not_take_the_places_of_sessions(served: Any) -> None:
    async with served(max_connections=1, token="a token that is long enough") as s:
        url = urlsplit(s.endpoint.base_url)
        wrong_key = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer wrong\r\n\r\n"
        held = []
        for sent in (b"", b"GET /v1/models HTTP/1.1\r\n", b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n", wrong_key):
            for _ in range(20):
                _, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.write(sent)
                held.append(writer)
        async with s.client(s.open()) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
        for writer in held:
            writer.close()


async def test_two_thousand_connections_against_a_thousand(served: Any) -> None:
    """Half of them are answered, the others turned away, and the session beside them samples on."""
    if allow_open_files(6000) < 6000:
        pytest.skip("this process may not open 6000 files: raise ulimit -n")
    async with served() as s:
        session = s.open()
        url = urlsplit(f"{s.endpoint.url_of(session)}/models")
        body: Any = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 240}
        held: list[asyncio.StreamWriter] = []

        async def status() -> int:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            held.append(writer)
            writer.write(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
            return int((await reader.readline()).split()[1])

        async with s.client(session) as client:
            first = await client.completions.create(**body)
            beside = asyncio.create_task(client.completions.create(**body))
            statuses = await asyncio.gather(*(status() for _ in range(2000)))
            # The session's own client has one of the thousand.
            assert (statuses.count(200), statuses.count(503)) == (999, 1001)
            assert first.choices[0].text == (await beside).choices[0].text == LOOP * 240
            for writer in held:
                writer.close()


async def test_more_connections_than_the_process_may_open_are_refused_at_the_start(served: Any) -> None:
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ConfigError, match=r"rollout\.endpoint\.max_connections = "):
        async with served(max_connections=highest):
            raise AssertionError("it has started")


async def test_calls_beyond_the_budget_are_refused(served: Any) -> None:
    async with served() as s, s.client(s.open(max_calls=1)) as client:
        await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="policy", messages=[QUESTION])  # type: ignore[list-item]
        assert error.value.code == "max_turns"


async def test_metrics_and_health_are_served_if_asked_for_clients_with_the_token(served: Any) -> None:
    async with served(metrics=True, token="secret") as on:
        base, token = on.endpoint.base_url, {"Authorization": "Bearer secret"}
        session = on.open()
        async with on.client(session) as client:
            answer = await client.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=8)
        async with aiohttp.ClientSession() as http:
            for page in ("metrics", "health"):
                # An agent has the key of its session only.
                for headers in ({}, {"Authorization": f"Bearer {session.secret}"}):
                    async with http.get(f"{base}/{page}", headers=headers) as response:
                        assert response.status == 401
            async with http.get(f"{base}/health", headers=token) as response:
                assert response.status == 200
                assert await response.json() == {"state": "ok", "cause": None, "sessions": 1, "requests": 0}
            async with http.get(f"{base}/metrics", headers=token) as response:
                text = await response.text()
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values[("megarl_endpoint_requests_total", "/s/{secret}/v1/chat/completions", "200")] == 1
        assert values[("megarl_endpoint_requests_total", "/metrics", "401")] == 2
        assert values[("megarl_endpoint_request_seconds_count", "/s/{secret}/v1/chat/completions")] == 1
        assert values[("megarl_engine_sampled_tokens_total",)] == answer.usage.completion_tokens
        assert values[("megarl_endpoint_sessions",)] == 1 and session.secret not in text

    async with (
        served() as without,
        aiohttp.ClientSession() as http,
        http.get(f"{without.endpoint.base_url}/metrics") as response,
    ):
        assert response.status == 404
