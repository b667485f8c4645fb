"""A harness of a random dialect, with sub-agents, summaries and rewound histories. One in ten dies between two calls.

It needs no package. It repeats a failed call as often as the vendors' clients do.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

NUM_RETRIES = 2
SHARE_OF_ABORTS = 0.05
ABORT_SECONDS = 0.05
"""Seconds after which such a client goes away. One in ten answers takes longer (`killed_driver.SLOW_SECONDS`)."""
DIALECTS = ("chat/completions", "messages", "responses")


def post(page: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """Return the endpoint's answer. A lost connection, and a status of 429 or 500 and more, is tried again."""
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    status, text = 0, b""
    # Some clients go away before their answer, and ask again: their call is aborted.
    waits = [600.0] * (NUM_RETRIES + 1)
    if random.random() < SHARE_OF_ABORTS:
        waits.insert(0, ABORT_SECONDS)
    for number, seconds in enumerate(waits):
        connection = http.client.HTTPConnection(base.netloc, timeout=seconds)
        status, text = 0, b""
        try:
            connection.request("POST", f"{base.path}/{page}", json.dumps(body), headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        if status == 200:
            return json.loads(text)
        if number == len(waits) - 1 or (status and status != 429 and status < 500):
            break
        time.sleep(0.0 if seconds == ABORT_SECONDS else 0.5 * 2**number)
    raise SystemExit(f"status {status}: {text[:300]!r}")


class Talk:
    """Calls of one dialect."""

    def __init__(self, draw: random.Random, dialect: str) -> None:
        self.dialect = dialect
        self.dies_after = draw.choice([draw.randrange(8), *[99] * 9])
        self.num_calls = 0

    def ask(self, messages: list[Any], added: str, agent: str = "") -> list[Any]:
        self.num_calls += 1
        if self.num_calls > self.dies_after:
            os._exit(1)
        messages = [*messages, {"role": "user", "content": added}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 100, "stream": False}
        if self.dialect == "responses":
            body = {"input": messages, "store": False}
        headers = {"x-megarl-agent": agent, "x-megarl-parent": "main"} if agent else {}
        answer = post(self.dialect, body, headers)
        if self.dialect == "messages":
            return [*messages, {"role": "assistant", "content": answer["content"]}]
        if self.dialect == "responses":
            return [*messages, *answer["output"]]
        return [*messages, answer["choices"][0]["message"]]


def main() -> None:
    problem, draw = json.loads(sys.stdin.readline()), random.Random()
    talk = Talk(draw, draw.choice(DIALECTS))
    main_agent = talk.ask([], problem["messages"][0]["content"])
    if draw.random() < 0.5:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: talk.ask([], "Check it.", f"a{n}"), range(2)))
    talk.ask(main_agent, f"Look at {draw.random()}.")
    time.sleep(draw.random())
    main_agent = talk.ask(main_agent, "Go on.")
    if draw.random() < 0.5:
        main_agent = talk.ask([], "So far: nothing.")
    talk.ask(main_agent, "End.")
    # Which dialect spoke is part of a reward that differs between attempts.
    print(json.dumps({"reward": DIALECTS.index(talk.dialect) + draw.random()}))


if __name__ == "__main__":
    main()
