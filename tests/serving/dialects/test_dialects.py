"""Dialects read by the vendors' own clients: an answer comes back in the next request as it was sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest

from megarl.rollout.stitch import ModelCall
from megarl.serving.answers import Answer
from megarl.serving.conversation import Conversation
from megarl.serving.dialects.chat import Chat, read_conversation
from megarl.serving.dialects.dialect import Dialect
from megarl.serving.dialects.messages import Messages
from megarl.serving.dialects.responses import Responses
from megarl.serving.dialects.sampling import RequestParameters
from megarl.serving.history import AnsweredConversation, History
from megarl.serving.refusal import RequestError
from megarl.types import Completion, SamplingSettings

SAMPLING = SamplingSettings(64, temperature=1.0)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
TEXTS = ("", "One line.", "Zwei Zeilen,\n\nmit „Zeichen“ 🙂", "x" * 700, "null")
REASONS = (None, "Let me see.\n", "y" * 300)
ARGUMENTS = (
    *('{"a": 1}', '{"a": 2.0}', '{"invalid_arguments": "{}"}'),
    *('{"b": [1, {"c": "é"}], "a": "\\n"}', "{}", "error: not JSON"),
)


def make_answer(
    number: int, text: str, reasoning: str | None, arguments: tuple[str, ...], ended: Any = "stop"
) -> Answer:
    completion = Completion(f"r{number}", np.array([number]), np.zeros(1, np.float32), ended, np.zeros(1, np.int32))
    calls = tuple((f"call_{number}_{i}", "n__add", argument) for i, argument in enumerate(arguments))
    call = ModelCall(np.arange(number + 3, dtype=np.int32), completion)
    return Answer(number, call, text, text, False, reasoning=reasoning, calls=calls)


def read(dialect: Dialect, body: Mapping[str, Any]) -> tuple[Conversation, RequestParameters]:
    chat, _ = dialect.convert_to_chat(body)
    return read_conversation(chat), RequestParameters.read(chat, SAMPLING)


class Server:
    """Answers a client's requests by one dialect, with the prepared answers in turn, and records forks."""

    def __init__(self, dialect: Dialect, answers: list[Answer]) -> None:
        self.dialect, self.answers = dialect, list(answers)
        self.history, self.forks, self.bodies = History(), [], []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        conversation, asked = read(self.dialect, body)
        known = self.history.find(conversation)
        if fork := self.history.find_fork(conversation, known):
            self.forks.append(fork.text)
        answer = self.answers.pop(0)
        whole = conversation.with_messages([answer.message])
        self.history.add(AnsweredConversation(whole, np.zeros(1, np.int32), answer.number))
        reply = self.dialect.reply(f"t.{answer.number}", "policy", asked, body)
        if not asked.is_streamed:
            return httpx2.Response(200, json=reply.make_body(answer, None))
        stream = reply.begin() + reply.waiting() + b"".join(reply.events(answer, None)) + reply.end
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)


def results_of(calls: list[str], make: Any) -> list[Any]:
    return [make(call_id, f"result {place}") for place, call_id in enumerate(calls)]


def talk_by_messages(server: Server, streams: list[bool]) -> list[Any]:
    http = httpx2.Client(transport=httpx2.MockTransport(server))
    client = anthropic.Anthropic(base_url="http://t", api_key="k", http_client=http, max_retries=0)
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Now."}]}
    ]
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    received = []
    for is_streamed in streams:
        asked: Any = {
            "model": "policy", "max_tokens": 50, "messages": messages, "tools": tools,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        }  # fmt: skip
        if is_streamed:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        received.append(message)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        replies = results_of(calls, lambda i, text: {"type": "tool_result", "tool_use_id": i, "content": text})
        messages = [*messages, {"role": "assistant", "content": content}]
        messages.append({"role": "user", "content": [*replies, {"type": "text", "text": "Go on."}]})
        messages.append({"role": "system", "content": "A reminder."})
    return received


def talk_by_responses(server: Server, streams: list[bool]) -> list[Any]:
    http = httpx2.Client(transport=httpx2.MockTransport(server))
    client = openai.OpenAI(base_url="http://t", api_key="k", http_client=http, max_retries=0)
    items: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Add."}]
    tools: Any = [
        {"type": "namespace", "name": "n", "tools": [CHAT_TOOL["function"] | {"type": "function"}]},
        {"type": "web_search"},
    ]
    received = []
    for is_streamed in streams:
        asked: Any = {"model": "policy", "input": items, "tools": tools, "store": False, "max_output_tokens": 50}
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                # The client's own `get_final_response` refuses a response that was cut.
                events = list(stream)
            last: Any = events[-1]
            response: Any = last.response
        else:
            response = client.responses.create(**asked)
        received.append(response)
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        items = [*items, *output]
        items += results_of(calls, lambda i, text: {"type": "function_call_output", "call_id": i, "output": text})
        items.append({"role": "user", "content": [{"type": "input_text", "text": "Go on."}]})
    return received


def talk_by_chat(server: Server, streams: list[bool]) -> list[Any]:
    http = httpx2.Client(transport=httpx2.MockTransport(server))
    client = openai.OpenAI(base_url="http://t", api_key="k", http_client=http, max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]
    received = []
    for is_streamed in streams:
        asked: Any = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                completion: Any = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        received.append(completion)
        message = completion.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        calls = [call["id"] for call in message.get("tool_calls") or ()]
        messages += results_of(calls, lambda i, text: {"role": "tool", "tool_call_id": i, "content": text})
        messages.append({"role": "user", "content": "Go on."})
    return received


TALKS = {
    "messages": (Messages(), talk_by_messages),
    "responses": (Responses(), talk_by_responses),
    "chat": (Chat(), talk_by_chat),
}


@pytest.mark.parametrize("name", TALKS)
def test_answers_come_back_as_they_were_sampled(name: str) -> None:
    """60 random conversations of four answers each, streamed or whole: no request begins a new sequence."""
    dialect, talk = TALKS[name]
    draw = random.Random(name)
    for _ in range(60):
        answers = [
            make_answer(
                number, draw.choice(TEXTS), draw.choice(REASONS), tuple(draw.choices(ARGUMENTS, k=draw.randrange(3)))
            )
            for number in range(4)
        ]
        server = Server(dialect, answers)
        talk(server, [draw.random() < 0.5 for _ in answers])
        assert server.forks == [] and not server.answers


def test_a_message_has_the_parts_of_the_answer() -> None:
    answers = [
        make_answer(0, "Text.", "Thought.", ('{"a": 2}', "error: not JSON")),
        make_answer(1, "Cut", None, (), "length"),
        make_answer(2, "Ends here###", None, ()),
    ]
    for streams in ([False] * 3, [True] * 3):
        first, cut, _ = talk_by_messages(Server(Messages(), answers), streams)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("Thought.", "Text.")
        assert first.content[2].input == {"a": 2}
        assert (first.stop_reason, cut.stop_reason) == ("tool_use", "max_tokens")
        assert (first.usage.input_tokens, first.usage.output_tokens) == (3, 1)
    stopped = Messages().reply("n", "policy", RequestParameters.read({"stop": ["###"]}, SAMPLING), {})
    assert stopped.make_body(answers[2], None)["stop_sequence"] == "###"


@pytest.mark.parametrize("field", ["stop", "stop_sequences"])
def test_texts_that_end_an_answer_are_read(field: str) -> None:
    """`stop` is no field of Anthropic's: it counts as in a chat."""
    _, asked = read(Messages(), ASK | {field: ["###"]})
    assert asked.stops == ("###",)


def test_a_response_has_the_parts_of_the_answer() -> None:
    answers = [
        make_answer(0, "Text.", "Thought.", ('{"a": 2}', '{"a": 3}')),
        make_answer(1, "Cut", None, (), "length"),
    ]
    for streams in ([False] * 2, [True] * 2):
        first, cut = talk_by_responses(Server(Responses(), answers), streams)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].summary[0].text == "Thought." and first.output_text == "Text."
        assert [item.arguments for item in first.output[2:]] == ['{"a": 2}', '{"a": 3}']
        assert (first.status, cut.status, cut.incomplete_details.reason) == (
            "completed",
            "incomplete",
            "max_output_tokens",
        )
        assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (3, 1, 4)


def test_events_of_a_response_are_numbered() -> None:
    reply = Responses().reply("n", "policy", RequestParameters.read({}, SAMPLING), {})
    stream = reply.begin() + reply.waiting() + b"".join(reply.events(make_answer(0, "Text.", None, ()), None))
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][:3] == [
        "response.created",
        "response.in_progress",
        "response.in_progress",
    ]
    assert events[-1]["type"] == "response.completed"


def test_blocks_become_messages_of_a_chat_by_fixed_rules() -> None:
    content = [
        {"type": "text", "text": "See this."},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}], "cache_control": {}},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no file", "is_error": True},
    ]
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "system", "content": "R"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": content},
    ]
    chat, _ = Messages().convert_to_chat({"system": "S", "messages": messages})
    assert [(message["role"], message["content"]) for message in chat["messages"]] == [
        ("system", "S"),
        ("user", "Q\nR"),
        ("assistant", ""),
        ("tool", "7"),
        ("tool", "error: no file"),
        ("user", "See this."),
    ]


def test_parts_of_an_answer_in_a_row_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Q"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}], "id": "random"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    chat, unused = Responses().convert_to_chat({"input": items, "instructions": "I", "reasoning": {"effort": "high"}})
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    answer = chat["messages"][2]
    assert (answer["reasoning_content"], answer["content"], len(answer["tool_calls"])) == ("T", "A", 2)
    assert unused == ["reasoning"]


def test_names_of_functions_come_back_with_their_namespaces() -> None:
    answers = [make_answer(0, "", None, ('{"a": 2}',))]
    [first] = talk_by_responses(server := Server(Responses(), answers), [True])
    assert (first.output[0].name, first.output[0].namespace) == ("add", "n")
    assert Responses().convert_to_chat(server.bodies[0])[0]["tools"][0]["function"]["name"] == "n__add"


def test_system_messages_after_the_first_are_texts_of_the_user() -> None:
    roles = ("developer", "user", "user", "assistant", "developer")
    items = [{"role": role, "content": role[0].upper()} for role in roles]
    chat, _ = Responses().convert_to_chat({"input": [*items, {"role": "user", "content": "Q"}], "instructions": "I"})
    assert [(message["role"], message["content"]) for message in chat["messages"]] == [
        ("system", "I\n\nD"),
        ("user", "U\nU"),
        ("assistant", "A"),
        ("user", "D\nQ"),
    ]


def test_numbers_that_a_javascript_client_writes_otherwise_are_no_change() -> None:
    answer = make_answer(0, "", None, ('{"timeout": 120.0, "big": 1e3}',))
    known, _ = read(Messages(), ASK)
    block = {"type": "tool_use", "id": "call_0_0", "name": "n__add", "input": {"timeout": 120, "big": 1000}}
    messages = [*ASK["messages"], {"role": "assistant", "content": [block]}, *ASK["messages"]]
    later, _ = read(Messages(), {"messages": messages})
    assert known.with_messages([answer.message]).keys == later.keys[:2]


ASK = {"messages": [{"role": "user", "content": "Q"}]}
REFUSED = [
    (Messages(), ASK | {"tool_choice": {"type": "any"}}, "tool_choice"),
    (Messages(), ASK | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
    (Messages(), ASK | {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    (Messages(), ASK | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    (Messages(), ASK | {"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
    (Messages(), ASK | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    (Messages(), {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
    (Messages(), {"messages": "Q"}, "messages"),
    (Messages(), ASK | {"top_p": 3}, "top_p"),
    (Messages(), ASK | {"max_tokens": 0}, "max_tokens"),
    (Responses(), {"input": "Q", "previous_response_id": "resp_1"}, "previous_response_id"),
    (Responses(), {"input": "Q", "conversation": "c"}, "conversation"),
    (Responses(), {"input": "Q", "truncation": "auto"}, "truncation"),
    (Responses(), {"input": "Q", "text": {"format": {"type": "json_schema"}}}, "text"),
    (Responses(), {"input": "Q", "tool_choice": "required"}, "tool_choice"),
    (Responses(), {"input": [{"type": "computer_call"}]}, "input.0"),
    (Responses(), {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    (Responses(), {"input": None}, "input"),
    (Responses(), {"input": "Q", "reasoning": "high"}, "reasoning"),
    (Messages(), ASK | {"system": 3}, "system"),
    (Messages(), ASK | {"structured_outputs": {"json": {}}}, "structured_outputs"),
    (Messages(), {"messages": [], "system": "S"}, "messages"),
    (Messages(), {"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    (Responses(), {"input": [], "instructions": "I"}, "input"),
    (Responses(), {"input": "Q", "logit_bias": {"5": 9}}, "logit_bias"),
    (Responses(), {"input": [{"type": "reasoning", "summary": 5}]}, "input.summary"),
    (Responses(), {"input": [{"type": "function_call", "name": "f", "arguments": None, "call_id": "c"}]}, "input.0"),
    (Messages(), ASK | {"context_management": 3}, "context_management"),
]


@pytest.mark.parametrize(("dialect", "body", "field"), REFUSED, ids=[f"{type(d).__name__} {f}" for d, _, f in REFUSED])
def test_what_would_change_the_samples_is_refused(dialect: Dialect, body: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(dialect, body)
    assert refused.value.param == field and refused.value.status == 400


def test_anthropics_client_reads_the_kind_of_an_error() -> None:
    long = RequestError("the context is full", code="context_length_exceeded")
    assert Messages().error(long)["error"]["message"].startswith("prompt is too long: ")
    kinds = {401: anthropic.AuthenticationError, 404: anthropic.NotFoundError, 400: anthropic.BadRequestError}
    for status, kind in kinds.items():
        body = Messages().error(RequestError("refused", status=status))
        http = httpx2.Client(transport=httpx2.MockTransport(lambda _, s=status, b=body: httpx2.Response(s, json=b)))
        client = anthropic.Anthropic(base_url="http://t", api_key="k", http_client=http, max_retries=0)
        with pytest.raises(kind, match="refused"):
            client.messages.create(model="policy", max_tokens=5, messages=[{"role": "user", "content": "Q"}])
