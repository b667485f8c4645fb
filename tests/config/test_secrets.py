"""Secrets in clear text: in which forms a recipe refuses them, and what only looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.reading.explaining import printable
from megarl.config.secrets import literal_secrets

HEX = "0123456789abcdef" * 2
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlc2lnbmF0dXJl"

# Each value stands in a field whose name says nothing, unless the case names one.
SECRETS: list[tuple[str, Any, tuple[str | int, ...]]] = [
    ("OpenAI", {"text": f"sk-{HEX}"}, ("text",)),
    ("OpenAI, of a project", {"text": f"sk-proj-{HEX}_x"}, ("text",)),
    ("Anthropic", {"text": f"sk-ant-api03-{HEX}"}, ("text",)),
    ("short", {"text": "sk-1234567890ab"}, ("text",)),
    ("within a text", {"text": f"use sk-{HEX} for it"}, ("text",)),
    ("Hugging Face", {"text": "hf_" + "aBcDeFgHiJ" * 3}, ("text",)),
    ("AWS", {"text": "AKIAIOSFODNN7EXAMPLE"}, ("text",)),
    ("AWS, for a session", {"text": "ASIAIOSFODNN7EXAMPLE"}, ("text",)),
    ("PEM", {"text": PEM}, ("text",)),
    ("PEM, RSA", {"text": "-----BEGIN RSA PRIVATE KEY-----"}, ("text",)),
    ("JWT", {"text": JWT}, ("text",)),
    ("GitHub", {"text": "ghp_" + "a1B2" * 9}, ("text",)),
    ("GitHub, fine-grained", {"text": "github_pat_" + "a1B2" * 9}, ("text",)),
    ("GitLab", {"text": "glpat-" + "a1B2" * 5}, ("text",)),
    ("Slack", {"text": "xoxb-123456789012-abcdefABCDEF"}, ("text",)),
    ("Google", {"text": "AIza" + "a1B2" * 8 + "abc"}, ("text",)),
    ("NVIDIA", {"text": "nvapi-" + "a1B2" * 8}, ("text",)),
    ("Groq", {"text": "gsk_" + "a1B2" * 8}, ("text",)),
    ("npm", {"text": "npm_" + "a1B2" * 9}, ("text",)),
    ("Stripe", {"text": "sk_live_" + "a1B2" * 6}, ("text",)),
    ("bearer", {"headers": {"X-Forwarded": "Bearer geheim123"}}, ("headers", "X-Forwarded")),
    ("pwd", {"pwd": "geheim"}, ("pwd",)),
    ("pass", {"db_pass": "geheim"}, ("db_pass",)),
    ("cookie", {"headers": {"Cookie": "id=geheim"}}, ("headers", "Cookie")),
    ("cookies", {"cookies": {"id": "geheim"}}, ("cookies", "id")),
    ("header of a key", {"headers": {"X-Api-Key": "geheim"}}, ("headers", "X-Api-Key")),
    ("signing key", {"signing_key": "geheim"}, ("signing_key",)),
    ("account key", {"AccountKey": "geheim"}, ("AccountKey",)),
    ("key of a vendor", {"wandb_key": "geheim"}, ("wandb_key",)),
    ("webhook's name", {"slack_webhook": "https://example.org/x"}, ("slack_webhook",)),
    ("number", {"password": 12345678}, ("password",)),
    ("option", {"command": ["agent", "--token", "geheim"]}, ("command", 2)),
    ("option with =", {"command": ["agent", "--api-key=geheim"]}, ("command", 1)),
    ("option in a text", {"command": ["sh", "-c", "agent --password geheim"]}, ("command", 2)),
    ("option in a field", {"start_command": "agent --token geheim"}, ("start_command",)),
    ("variable", {"command": ["env", "HF_TOKEN=geheim", "agent"]}, ("command", 1)),
    ("variable of a shell", {"command": ["sh", "-c", "HF_TOKEN=geheim agent"]}, ("command", 2)),
    ("header of curl", {"command": ["curl", "-H", "Authorization: Bearer geheim"]}, ("command", 2)),
    ("user of curl", {"command": ["curl", "--user", "me:geheim"]}, ("command", 2)),
    ("sbatch", {"sbatch_options": ["--export=HF_TOKEN=geheim"]}, ("sbatch_options", 0)),
    ("sbatch, more", {"sbatch_options": ["--export=ALL,A=1,HF_TOKEN=geheim"]}, ("sbatch_options", 0)),
    ("agent's variable", {"environment": ["HF_TOKEN=geheim"]}, ("environment", 0)),
    ("Slack's webhook", {"url": "https://hooks.slack.com/services/T0/B0/geheim"}, ("url",)),
    ("Discord's webhook", {"url": "https://discord.com/api/webhooks/1/geheim"}, ("url",)),
    ("Teams' webhook", {"url": "https://x.webhook.office.com/webhookb2/geheim@x/y"}, ("url",)),
    ("Telegram's bot", {"url": "https://api.telegram.org/bot12345:geheim/sendMessage"}, ("url",)),
    ("webhook elsewhere", {"url": "https://example.org/webhook/a1b2c3d4e5f6"}, ("url",)),
    ("key in a URL", {"url": "https://example.org/v1?key=geheim"}, ("url",)),
    ("signature in a URL", {"url": "https://x.blob.core.windows.net/c?sv=1&sig=geheim"}, ("url",)),
    ("Azure's connection", {"text": "AccountName=a;AccountKey=geheim;EndpointSuffix=c"}, ("text",)),
    ("password of a database", {"dsn": "postgresql://me:geheim@host/db"}, ("dsn",)),
    ("JSON in a text", {"settings": '{"api_key": "geheim"}'}, ("settings",)),
    ("JSON in a list", {"command": ["agent", '{"a": {"token": "geheim"}}']}, ("command", 1)),
    ("deep", {"a": [{"b": [f"sk-{HEX}"]}]}, ("a", 0, "b", 0)),
    ("in a key", {"a": {f"sk-{HEX}": 1}}, ("a", "<hidden>")),
    ("UUID", {"text": "sk-lf-1a2b3c4d-12ab-4cde-9f01-0123456789ab"}, ("text",)),
    ("pass alone", {"kwargs": {"pass": "geheim"}}, ("kwargs", "pass")),
    ("first of several", {"first_access_token": "geheim"}, ("first_access_token",)),
    ("header token", {"command": ["curl", "-H", "Token: geheim"]}, ("command", 2)),
    ("data set", {"data": {"train": "https://me:geheim@host/x.jsonl"}}, ("data", "train")),
]

INNOCENT: list[Any] = [
    {"text": "sk-learn"},
    {"text": "data/sk-corpus-2024.jsonl"},
    {"text": "sk-corpus-2024.jsonl"},
    {"text": "a risk-adjusted task-runner12345"},
    {"text": "hf_best"},
    {"text": "hf_checkpoints_of_2024"},
    {"text": "hf_transfer"},
    {"text": "AKIA"},
    {"text": "Basic arithmetic is allowed. The bearer of the token answers."},
    {"text": "eyJ is how a token begins."},
    {"system_prompt": 'Answer as {"answer": "x"}. Your password: never tell. --token is an option.'},
    {"system_prompt": "Authorization: only for admins."},
    {"stop": ["</answer>", "token=", "pass:"]},
    {"pass_at": 4, "num_pass": "two", "two_pass": True},
    {"max_num_batched_tokens": 64, "stop_tokens": ["<s>"], "eos_token": "</s>", "num_tokens": 5},
    {"tokens": 8192, "max_tokens": "8192"},
    {"key": "problem", "prompt_key": "prompt", "sort_keys": "x", "label_key": "gold"},
    {"api_key_env": "OPENAI_API_KEY", "password_env": "MY_PASSWORD", "token_env": "T"},
    {"command": ["python", "agent.py", "--max-tokens", "512", "--tokenizer", "gpt2", "--token-limit", "5"]},
    {"command": ["agent", "--token", "$HF_TOKEN", "--password", "${PASSWORD}", "--secret-file", "x"]},
    {"command": ["agent", "--max_tokens=512", "--pass", "--user", "me"]},
    {"command": ["sh", "-c", 'HF_TOKEN=$MY agent --token $T --password "$P" --api-key=${K}']},
    {"environment": ["HF_TOKEN", "SEARCH_KEY"]},
    {"srun_options": ["--export=ALL,HF_TOKEN", "--container-image=/x.sqsh", "--mem=0"]},
    {"sbatch_options": ["--partition=gpu", "--account=team", "--constraint=a100"]},
    {"url": "http://127.0.0.1:8000/v1"},
    {"url": "https://h:80/a@b"},
    {"url": "https://example.org/webhooks"},
    {"url": "https://example.org/score?model=x&n=3&sort=key"},
    {"url": "http://collector:4318/v1/traces"},
    {"path": "s3://bucket/key/part-0001.parquet"},
    {"path": "runs/0123456789abcdef0123456789abcdef01234567"},
    {"revision": "0123456789abcdef0123456789abcdef01234567"},
    {"model": "org/sk-model-8b", "template": "{% if tokens %}"},
    {"text": "-----BEGIN CERTIFICATE-----"},
    {"text": "-----BEGIN PUBLIC KEY-----"},
    {"data": {"validation": {"tokens": "t.jsonl", "password": "p.jsonl", "secrets": "s.jsonl"}}},
    {"hf_token": True, "use_auth": False, "password": None, "secret": ""},
    {"reward": "megarl.rewards:auth", "function": "my.module:token"},
    {"equation": "x=3, token=4"},
    {"pattern": r"(?:password|token)\s*=\s*(\S+)"},
    {"bypass": "x", "compass": "north", "cookie_cutter": "x", "passage": "text"},
    {"webhook_timeout": "5", "webhooks_enabled": "no"},
    {"name": "sk-ablation-2"},
    {"name": "sk-qwen3-8b-grpo"},
    {"name": "hf_llama3baseline"},
    {"text": "sk-qwen3-8b-grpo with hf_llama3baseline, sk-ablation-2 and sk-sweep-20250102-123456"},
    {"command": "python agent.py --max_new_token 1024 --min-token=3 --context_token 5"},
    {"command": ["agent", "--max-new-token", "1024", "--api-key", "EMPTY", "--api-key=none", "--pass", "all"]},
    {"command": "agent --api-key EMPTY --password dummy"},
    {"headers": {"Authorization": "Bearer EMPTY"}, "api_key": "EMPTY"},
    {"tags": ["token:small", "pass:all"], "command": ["agent", "--tag", "token:small"]},
    {"kwargs": {"first_token": "A", "pass": "all", "maxNewToken": "5"}},
]


@pytest.mark.parametrize(("values", "place"), [pytest.param(*case[1:], id=case[0]) for case in SECRETS])
def test_a_secret_in_clear_is_one_line_that_hides_it(values: dict[str, Any], place: tuple[str | int, ...]) -> None:
    lines = list(literal_secrets(values, {}))
    assert [line.partition(" = ")[0] for line in lines] == [".".join(map(str, place))]
    assert "geheim" not in lines[0] and HEX not in lines[0] and "${oc.env:NAME}" in lines[0]
    shown = str(printable(values, (), {}))
    assert "geheim" not in shown and HEX not in shown and "<hidden>" in shown


@pytest.mark.parametrize("values", INNOCENT, ids=str)
def test_what_only_looks_like_a_secret_is_accepted(values: dict[str, Any]) -> None:
    assert list(literal_secrets(values, {})) == []
    assert "<hidden>" not in str(printable(values, (), {}))


def test_references_within_secrets_are_accepted() -> None:
    references = {
        ("command", 2): "${oc.env:TOKEN}",
        ("header",): "Bearer ${oc.env:TOKEN}",
        ("export",): "--export=HF_TOKEN=${oc.env:TOKEN}",
    }
    values = {"command": ["a", "--token", "geheim"], "header": "Bearer geheim123", "export": "--export=HF_TOKEN=geheim"}
    assert list(literal_secrets(values, references)) == []
    assert "geheim" not in str(printable(values, (), references))
