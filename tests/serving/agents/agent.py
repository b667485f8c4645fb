"""An agent program: it lets the model answer, carries its calls out, and prints whether there was one."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def main() -> None:
    messages = json.loads(sys.stdin.readline())["messages"]
    client = OpenAI()
    num_calls = 0
    for _ in range(2):
        message = client.chat.completions.create(model="any", messages=messages, tools=[TOOL]).choices[0].message  # type: ignore[list-item]
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        num_calls += 1
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    print("done")
    print(json.dumps({"reward": float(num_calls > 0)}))


main()
