"""Environments with tools: schemas, a reply for every call, also where tools fail, hang or say too much."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from megarl.data.tools.schemas import arguments_fault
from megarl.environments import Start, Step, Turn
from megarl.environments.tools import ToolEnvironment, ToolError, cut_in_the_middle, tool
from megarl.types import Problem, ToolCall

PROBLEM = Problem(0, ({"role": "user", "content": "?"},), (1,), "4")
KEYS = ("slow", "quick", "blocking", "raising", "refusing", "hanging", "stuck", "long")


class Shop(ToolEnvironment):
    """Tools that answer late, fail, hang and say too much."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.order: list[str] = []
        self.quick_is_done = asyncio.Event()
        self.release = threading.Event()

    @tool
    async def slow(self, item: str) -> str:
        """Answers after quick has."""
        await self.quick_is_done.wait()
        self.order.append("slow")
        return f"slow {item}"

    @tool
    async def quick(self, item: str, kind: Literal["a", "b"] = "a", counts: list[int] | None = None) -> dict[str, Any]:
        """The price of an item,
        in euros.

        item: its name
        counts: how many: of each
        """
        self.order.append("quick")
        self.quick_is_done.set()
        return {"item": item, "kind": kind}

    @tool
    def blocking(self, number: int) -> int:
        self.order.append(f"blocking {number}")
        return number * 2

    @tool
    async def raising(self) -> str:
        raise KeyError("nothing there")

    @tool
    async def refusing(self) -> str:
        raise ToolError("not today")

    @tool
    async def hanging(self) -> str:
        await asyncio.Event().wait()
        return ""

    @tool
    def stuck(self) -> str:
        self.release.wait()
        return ""

    @tool(schema={"type": "object", "properties": {"anything": {}}})
    async def long(self, anything: Any = None) -> str:
        return "0123456789" * 1000


async def stepped(shop: Shop, *calls: ToolCall, finish_reason: Literal["stop", "length"] = "stop") -> Step:
    return await shop.step(Turn(0, "", finish_reason, calls=calls))


def call(place: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{place}", name, arguments)


def contents(step: Step) -> list[Any]:
    return [message["content"] for message in step.messages]


async def test_schemas_are_of_signature_and_docstring_or_given() -> None:
    shop = Shop()
    assert [schema["function"]["name"] for schema in shop.tools] == sorted(KEYS)
    schemas = {schema["function"]["name"]: schema for schema in shop.tools}
    assert schemas["quick"] == {
        "type": "function",
        "function": {
            "name": "quick",
            "description": "The price of an item, in euros.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "its name"},
                    "kind": {"enum": ["a", "b"], "type": "string"},
                    "counts": {
                        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                        "description": "how many: of each",
                    },
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }
    assert schemas["long"]["function"]["parameters"] == {"type": "object", "properties": {"anything": {}}}
    assert await shop.reset(PROBLEM, 0) == Start(PROBLEM.messages, shop.tools)

    def untyped(self: Any, x): ...  # type: ignore[no-untyped-def]

    def odd(self: Any, x: Lock) -> None: ...

    def uncalled(self: Any, x: Callable[[], None]) -> None: ...

    for function, word in ((untyped, "x needs a type"), (odd, "unknown to JSON .*lock"), (uncalled, "unknown to JSON")):
        with pytest.raises(TypeError, match=word):
            tool(function)


@dataclass
class Place:
    row: int
    column: Annotated[int, Field(ge=0)] = 0


class Board(ToolEnvironment):
    @tool
    async def mark(self, places: list[Place]) -> int:
        """Mark places."""
        return sum(10 * place.row + place.column for place in places)


async def test_a_tool_takes_objects_of_its_parameters_types() -> None:
    board = Board()
    (schema,) = board.tools
    for places, fault in (([{"row": 1}, {"row": 2, "column": 3}], None), ([{"row": 1, "column": -1}], "minimum")):
        found = arguments_fault({"places": places}, schema)
        assert found is None if fault is None else found is not None and fault in found
    step = await stepped(board, call(0, "mark", places=[{"row": 1}, {"row": 2, "column": 3}]))
    assert step.messages[0]["content"] == "33"


async def test_every_call_gets_one_reply_in_the_order_of_the_calls() -> None:
    shop = Shop()
    broken = ToolCall("call2", "weather", None, "there is no tool 'weather'")
    step = await stepped(
        shop, call(0, "slow", item="tea"), call(1, "quick", item="Öl"), broken, call(3, "blocking", number=3)
    )
    assert step.messages == (
        {"role": "tool", "name": "slow", "tool_call_id": "call0", "content": "slow tea"},
        {"role": "tool", "name": "quick", "tool_call_id": "call1", "content": '{"item": "Öl", "kind": "a"}'},
        {"role": "tool", "name": "weather", "tool_call_id": "call2", "content": "error: there is no tool 'weather'"},
        {"role": "tool", "name": "blocking", "tool_call_id": "call3", "content": "6"},
    )
    assert shop.order.index("quick") < shop.order.index("slow")
    assert not step.done and step.reward is None
    assert step.metrics["tools/slow/calls"] == step.metrics["tools/blocking/calls"] == 1
    assert step.metrics["tools/slow/seconds"] > 0 and step.metrics["tools/hanging/seconds"] == 0
    assert step.metrics["tools/invalid"] == 1 and step.metrics["tools/slow/errors"] == 0


async def test_tools_that_block_are_called_one_after_the_other() -> None:
    shop = Shop()
    await stepped(shop, *(call(number, "blocking", number=number) for number in range(20)))
    assert shop.order == [f"blocking {number}" for number in range(20)]


async def test_what_raises_or_hangs_is_replied_to_with_an_error() -> None:
    shop = Shop(tool_seconds=0.05)
    step = await stepped(
        shop, *(call(number, name) for number, name in enumerate(("raising", "refusing", "hanging", "stuck")))
    )
    shop.release.set()
    late = "error: the tool took longer than 0.05 seconds"
    assert contents(step) == ["error: KeyError: 'nothing there'", "error: not today", late, late]
    assert [step.metrics[f"tools/{name}/errors"] for name in ("raising", "refusing", "hanging", "stuck")] == [1] * 4
    assert step.metrics["tools/invalid"] == 0


async def test_a_long_reply_loses_its_middle() -> None:
    step = await stepped(Shop(max_reply_characters=200), call(0, "long"))
    (reply,) = contents(step)
    assert len(reply) <= 200
    assert reply.startswith("0123456789") and reply.endswith("0123456789")
    assert "characters and more left out" in reply
    assert step.metrics["tools/shortened"] == 1
    assert cut_in_the_middle("x" * 200, 200) == "x" * 200


async def test_an_answer_ends_the_attempt_and_a_call_does_not() -> None:
    shop = Shop()
    assert (await stepped(shop)).done
    broken = ToolCall("call0", "", None, "the call cannot be read")
    assert not (await stepped(shop, broken)).done and not (await stepped(shop, call(1, "blocking", number=1))).done


async def test_a_call_that_the_turns_length_cut_is_no_invalid_one() -> None:
    broken = ToolCall("call0", "", None, "it is cut off")
    assert (await stepped(Shop(), broken, finish_reason="length")).metrics["tools/invalid"] == 0
    assert (await stepped(Shop(), broken, broken, finish_reason="length")).metrics["tools/invalid"] == 1


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_reply_characters"):
        Shop(max_reply_characters=10)
