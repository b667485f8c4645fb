"""The vendors' clients of messages and responses, unchanged, at an endpoint before a real engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import pytest
from openai import AsyncOpenAI

from megarl.rollout.stitch import stitch
from megarl.serving.session import Session
from tests.rollout.engines import CONTEXT_TOKENS
from tests.serving.scripted_pool import ScriptedPool, scripted_endpoint
from tests.serving.served import Served
from tests.serving.test_endpoint import ADD

QUESTION = "Add 2 and 3."
FUNCTION = {"type": "function", **ADD["function"]}
TOOL: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}


def add(arguments: Any) -> str:
    return str(sum(arguments.values())) if set(arguments) == {"a", "b"} else "error: give a and b"


def anthropic_client(s: Served, session: Session, **settings: Any) -> anthropic.AsyncAnthropic:
    base_url = s.endpoint.url_of(session).removesuffix("/v1")
    return anthropic.AsyncAnthropic(**({"base_url": base_url, "api_key": "unused", "max_retries": 0} | settings))


async def talk_by_messages(client: anthropic.AsyncAnthropic, num_turns: int, *, streams: bool) -> list[int]:
    """Chat with a tool. Returns the numbers of sampled tokens in the client's answers."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    usages = []
    for _ in range(num_turns):
        asked: Any = {"model": "policy", "max_tokens": 20, "messages": messages, "tools": [TOOL]}
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        usages.append(message.usage.output_tokens)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": add(block["input"])}
            for block in content
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Add."}]})
    return usages


async def talk_by_responses(client: AsyncOpenAI, num_turns: int, *, streams: bool) -> list[int]:
    """Chat with a tool. Returns the numbers of sampled tokens in the client's answers."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    usages = []
    for _ in range(num_turns):
        asked: Any = {"model": "policy", "max_output_tokens": 20, "input": items, "tools": [FUNCTION], "store": False}
        if streams:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            last: Any = events[-1]
            response: Any = last.response
        else:
            response = await client.responses.create(**asked)
        usages.append(response.usage.output_tokens)
        for item in response.output:
            items.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                try:
                    output = add(json.loads(item.arguments))
                except json.JSONDecodeError as error:
                    output = f"no JSON: {error}"
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        items.append({"role": "user", "content": "Add."})
    return usages


async def test_agents_of_both_dialects_are_recorded_as_they_were_sampled(served: Any) -> None:
    async with served() as s:
        sessions = [s.open(seed=f"{n}") for n in range(16)]

        async def agent(number: int, session: Session) -> list[int]:
            streams = number % 4 < 2
            if number % 2:
                async with anthropic_client(s, session) as client:
                    return await talk_by_messages(client, 2, streams=streams)
            async with s.client(session) as client:
                return await talk_by_responses(client, 2, streams=streams)

        usages = await asyncio.gather(*(agent(number, session) for number, session in enumerate(sessions)))
        sent = {name: prompt for name, prompt, _ in await s.requests()}
        for session, sampled in zip(sessions, usages, strict=True):
            assert [len(answer.call.completion.token_ids) for answer in session.answers] == sampled
            for answer in session.answers:
                assert sent[f"{session.name}.{answer.number}"] == answer.call.prompt_token_ids.tolist()
            assert session.counts["forks"] == 0 and len(stitch([answer.call for answer in session.answers])) == 1
        assert sum(len(answer.calls) for session in sessions for answer in session.answers) > 10


async def test_a_request_that_is_repeated_without_its_stream_is_the_same_call(served: Any) -> None:
    async with served() as s:
        session = s.open()
        asked: Any = {"model": "policy", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
        async with anthropic_client(s, session) as client:
            # Both wait for one answer.
            whole, stream = await asyncio.gather(
                client.messages.create(**asked), client.messages.create(**asked, stream=True)
            )
            events = [event async for event in stream]
        assert whole.usage.output_tokens == events[-2].usage.output_tokens
        assert session.counts["joined_retries"] == 1 and len(session.answers) == 1


async def test_keys_counts_and_errors_have_anthropics_form(served: Any) -> None:
    async with served() as s:
        session = s.open()
        messages: Any = [{"role": "user", "content": QUESTION}]
        async with anthropic_client(s, session, base_url=s.endpoint.base_url, api_key=session.secret) as client:
            # The key is in the header `x-api-key`.
            counted = await client.messages.count_tokens(model="policy", messages=messages, tools=[TOOL])
            message = await client.messages.create(model="policy", max_tokens=5, messages=messages, tools=[TOOL])
            assert counted.input_tokens == message.usage.input_tokens == len(session.answers[0].call.prompt_token_ids)
            with pytest.raises(anthropic.BadRequestError) as refused:
                choice: Any = {"type": "tool", "name": "add"}
                await client.messages.create(model="policy", max_tokens=5, messages=messages, tool_choice=choice)
            assert refused.value.type == "invalid_request_error"
            long: Any = [{"role": "user", "content": "word " * 2 * CONTEXT_TOKENS}]
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(model="policy", max_tokens=5, messages=long)
        async with anthropic_client(s, session, base_url=s.endpoint.base_url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="policy", max_tokens=5, messages=messages)
        await s.sessions.end(session)
        async with anthropic_client(s, session) as client:
            with pytest.raises(anthropic.APIStatusError) as over:
                await client.messages.create(model="policy", max_tokens=5, messages=messages)
        assert over.value.status_code == 410


async def test_a_stream_that_waits_sends_events(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients limit the time between events, and do not count comments."""
    monkeypatch.setattr("megarl.serving.answer_sender.KEEP_ALIVE_SECONDS", 0.001)
    async with served() as s:
        asked: Any = {"model": "policy", "max_output_tokens": 100, "input": QUESTION, "stream": True}
        async with s.client(s.open()) as client:
            kinds = [event.type async for event in await client.responses.create(**asked)]
        assert kinds[0] == "response.created" and kinds.count("response.in_progress") >= 2
        assert kinds[-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_call_beyond_the_limit_of_tokens_is_refused_in_each_dialect(streams: bool) -> None:
    """The last answer is cut at the limit, as each dialect says it. The next call is refused, and ends the attempt."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "stream": streams}
    pages: dict[str, tuple[dict[str, Any], str]] = {
        "chat/completions": (asked, '"finish_reason": "length"'),
        "messages": (asked | {"max_tokens": 100}, '"stop_reason": "max_tokens"'),
        "responses": ({"input": QUESTION, "store": False, "stream": streams}, '"reason": "max_output_tokens"'),
    }
    async with scripted_endpoint(ScriptedPool(["one two three four five"])) as s, aiohttp.ClientSession() as http:
        for page, (body, cut) in pages.items():
            session = s.open(sampled_tokens=3)
            url = f"{s.endpoint.url_of(session)}/{page}"
            async with http.post(url, json=body) as response:
                assert response.status == 200 and cut in (await response.text()).replace('":"', '": "')
            assert session.outcome is None
            async with http.post(url, json=body | {"temperature": 1.0, "metadata": {}}) as response:
                refused = await response.json()
            assert response.status == 400 and "rollout.agent.sampled_tokens" in refused["error"]["message"]
            if page == "messages":
                assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"
            else:
                assert refused["error"]["code"] == "sampled_tokens"
            assert session.outcome is not None and session.outcome.startswith("TokenLimit: ")
            assert [answer.num_sampled_tokens for answer in session.answers] == [3]
