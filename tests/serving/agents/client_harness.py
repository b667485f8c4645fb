"""An agent program that hands its problem to an unchanged client, one of its arguments, by the attempt's number.

It prints whether the client came to an end that it calls a success.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_CALLS = 3


def run_mini(task: str, folder: Path) -> bool:
    """Run the command of mini-swe-agent with its own configuration. Returns whether the policy submitted."""
    quiet = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # The class `default` never asks a person at a limit, as the class of a terminal does.
    arguments = ["--agent-class", "default", "--exit-immediately", "-y", "-m", "openai/policy", "-t", task]
    limits = ["-c", "mini.yaml", "-c", f"agent.step_limit={MAX_CALLS}"]
    subprocess.run(
        [str(Path(sys.executable).with_name("mini")), *arguments, *limits, "-o", str(folder / "mini.json")],
        env={**os.environ, **quiet, "MSWEA_GLOBAL_CONFIG_DIR": str(folder)},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return json.loads((folder / "mini.json").read_text())["info"]["exit_status"] == "Submitted"


def run_claude_code(task: str, folder: Path) -> bool:
    """Run Claude Code with one tool. Returns whether it ended by itself."""
    quiet = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS", "IS_SANDBOX",
    )  # fmt: skip
    variables = {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "ANTHROPIC_MODEL": "policy",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    done = subprocess.run(
        ["claude", "-p", task, "--tools", "Bash", "--dangerously-skip-permissions", "--max-turns", str(MAX_CALLS)],
        env={**os.environ, **variables, **dict.fromkeys(quiet, "1")},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=folder,
    )
    # It ends with 1 at the limit of turns.
    return done.returncode == 0


CODEX_SETTINGS = """
model = "policy"
model_provider = "megarl"
check_for_update_on_startup = false
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.megarl]
name = "megarl"
base_url = {base_url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[agents]
enabled = false

[analytics]
enabled = false

[otel]
metrics_exporter = "none"

[features]
plugins = false
apps = false
"""
"""Settings of Codex: the endpoint, no sandbox of its own, no other hosts, and no sub-agents."""


def run_codex(task: str, folder: Path) -> bool:
    """Run Codex. Returns whether it ended with a whole answer: its exit code is 1 after one cut at a limit."""
    settings = CODEX_SETTINGS.format(base_url=json.dumps(os.environ["OPENAI_BASE_URL"]))
    (folder / "config.toml").write_text(settings)
    done = subprocess.run(
        ["codex", "exec", "--skip-git-repo-check", task],
        env={**os.environ, "CODEX_HOME": str(folder), "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=folder,
    )
    return done.returncode == 0


def run_pydantic_ai(task: str, model: str, *, streams: bool) -> bool:
    """Run an agent of pydantic-ai. Returns whether it ended with a text."""
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
    from pydantic_ai.usage import UsageLimits

    # Its provider asks for this variable, although the vendor's client takes the token too.
    os.environ["ANTHROPIC_API_KEY"] = os.environ["ANTHROPIC_AUTH_TOKEN"]
    agent: Any = Agent(model, retries=1)

    @agent.tool_plain
    def bash(command: str) -> str:
        """Return the output of a command."""
        return subprocess.run(command, shell=True, capture_output=True, text=True).stdout

    async def run() -> str:
        limits: Any = {"usage_limits": UsageLimits(request_limit=MAX_CALLS)}
        if not streams:
            return (await agent.run(task, **limits)).output
        async with agent.run_stream(task, **limits) as stream:
            return await stream.get_output()

    try:
        return bool(asyncio.run(run()))
    # The policy sampled an unreadable call, or calls without end.
    except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
        print(error, file=sys.stderr)
        return False


def main() -> None:
    folder, *clients = sys.argv[1:]
    problem = json.loads(sys.stdin.readline())
    task, client = problem["messages"][-1]["content"], clients[problem["number"] % len(clients)]
    own = Path(folder, f"{problem['index']}-{problem['number']}-{os.getpid()}")
    own.mkdir()
    commands = {"mini-swe-agent": run_mini, "claude": run_claude_code, "codex": run_codex}
    if client in commands:
        succeeded = commands[client](task, own)
    else:
        succeeded = run_pydantic_ai(task, client, streams=problem["index"] % 2 == 1)
    (own / "client").write_text(client)
    print(json.dumps({"reward": float(succeeded)}))


if __name__ == "__main__":
    main()
