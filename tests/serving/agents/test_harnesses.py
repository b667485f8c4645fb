"""Harnesses of other projects, unchanged, train against the endpoint of a run."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.rollout.journal.state import account_tokens
from tests.logged_steps import logged_steps
from tests.serving.tool_model import make_tool_model
from tools.runs import run_megarl

BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo 5"}}\n</tool_call>'
SUBMIT = BASH.replace("echo 5", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
CLIENTS = ("mini-swe-agent", "openai-chat:policy", "openai-responses:policy", "anthropic:policy")
COMMANDS = (
    (
        "claude",
        "@anthropic-ai/claude-code",
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo 5", "description": "Print 5"}}\n</tool_call>',
    ),
    (
        "codex",
        "@openai/codex",
        '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo 5"}}\n</tool_call>',
    ),
)
"""Command-line agents: program, npm package, and a call of their tool."""
RECIPE = """
name: harnesses
loop: rl
model: {model}
data: {data}
cluster: {{ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: {row_tokens}}}
optimizer: {{learning_rate: 1e-3}}
rollout:
  kv_cache_gib: 0.3
  sampling: {{max_new_tokens: 24}}
  environment: command
  max_turns: {max_turns}
  agent: {{command: {command}, timeout_seconds: 600, max_processes: 2}}
  endpoint: {{hold_seconds: 600}}
train: {{steps: 2, prompts_per_step: 1, samples_per_prompt: {samples}}}
samples_every_steps: 1
"""


def train(
    tiny_model: Callable[..., Path],
    folder: Path,
    *,
    calls: tuple[str, str],
    clients: tuple[str, ...],
    prompt_tokens: int,
    max_turns: int = 4,
) -> None:
    """Train two steps with a policy that makes `calls`, one attempt of each client in a step, and check the run."""
    source = tiny_model(num_layers=1, tie_word_embeddings=False, vocab_size=512, max_position_embeddings=65536)
    model = make_tool_model(source, folder / "model", calls)
    problems = [{"messages": [{"role": "user", "content": f"Add {n}."}], "gt_answer": f"{n}"} for n in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "attempts").mkdir()
    program = [sys.executable, str(Path(__file__).with_name("client_harness.py")), str(folder / "attempts"), *clients]
    recipe = RECIPE.format(
        model=json.dumps({"path": str(model), "dtype": "float32"}),
        data=json.dumps({"train": str(folder / "train.jsonl"), "max_prompt_tokens": prompt_tokens}),
        command=json.dumps(program),
        row_tokens=prompt_tokens + 192,
        samples=max(2, len(clients)),
        max_turns=max_turns,
    )
    (folder / "recipe.yaml").write_text(recipe)
    done = run_megarl("train", "recipe.yaml", folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (folder / "runs").iterdir()
    steps = [step for step in logged_steps(run) if "rollout/turns/mean" in step]
    assert len(steps) == 2
    for step in steps:
        # A token other than the engine's would have another log-prob in the trainer.
        assert step["rollout/ended/error"] == 0 and step["logprob_gap/max"] < 1e-4
        # Forks may be: mini-swe-agent leaves an answer without a tool call out of its next request.
        assert step["environment/refused_calls"] == 0
    # Every client came to its end in each step.
    ended = Counter(file.read_text() for file in (folder / "attempts").glob("*/client"))
    assert ended == dict.fromkeys(clients, 2 * max(2, len(clients)) // len(clients))
    account = account_tokens(run)
    assert account is not None and account.faults == [] and account.num_trained > 0
    assert account.sampled == account.num_trained + account.num_untrained and not account.lost + account.waiting


@pytest.mark.end_to_end
@pytest.mark.timeout(900)
def test_harnesses_of_others_train_unchanged(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """pydantic-ai streams at one of the two problems. mini-swe-agent's first prompt has about 4,000 tokens here."""
    train(tiny_model, tmp_path, calls=(BASH, SUBMIT), clients=CLIENTS, prompt_tokens=8000)


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("client", "package", "tool"), COMMANDS, ids=[name for name, *_ in COMMANDS])
def test_command_line_agents_train_unchanged(
    tiny_model: Callable[..., Path], tmp_path: Path, client: str, package: str, tool: str
) -> None:
    if shutil.which(client) is None:
        pytest.skip(f"{client} is not installed: npm install --global {package}")
    # Codex has no limit of turns. Half of the policy's answers call a tool, so it never reaches this one.
    train(tiny_model, tmp_path, calls=(tool, BASH), clients=(client,), prompt_tokens=40_000, max_turns=20)
