import subprocess
import sys

import pytest

from megarl.rewards import REWARDS, SERVED, find_import_path, metric_name, resolve, server_kind
from megarl.rewards.scoring.calling import Sample, bind
from megarl.types import ConfigError


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "code"])  # that needs a sandbox: test_code.py
def test_table_names_resolve_to_working_functions(name):
    kwargs = {"format": {"form": "boxed"}, "length": {"target": 1}}.get(name, {})
    sample = Sample("no answer at all", "1", record={"metadata": {"source_dataset": "chain_sum"}}, num_tokens=3)
    function = bind(name, resolve(name), kwargs)
    result = function(sample.values(function.needs, 1.0))
    assert result.score == 0.0 and not result.format_valid and not result.answer_correct


def test_names_of_tasks_and_of_further_servers():
    assert find_import_path("reasoning_gym.chain_sum") == "megarl.rewards.functions.reasoning_gym:chain_sum"
    assert find_import_path("judge.style") == find_import_path("judge") == SERVED["judge"]
    assert (server_kind("judge.style"), server_kind("judge.py:f"), server_kind("judges")) == ("judge", None, None)
    assert metric_name("judge.style") == "judge.style" and metric_name("my/judge.py:f") == "f"


def test_a_function_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my-rewards.py").write_text("def length(completion_text): return 3 * len(completion_text)\n")
    monkeypatch.chdir(tmp_path)
    assert find_import_path("mine/my-rewards.py:length") == "mine/my-rewards.py:length"
    assert resolve("mine/my-rewards.py:length")("four") == 12
    assert resolve(f"{tmp_path}/mine/my-rewards.py:length") is resolve("mine/my-rewards.py:length")


def test_user_function(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def length(text, answer, *, correct_score): return len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("my_rewards:length")("four", "", correct_score=1.0) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "boxd", r"reward\.functions: unknown reward 'boxd'\. Did you mean 'boxed'\? Known: boxed, th", id="typo"
        ),
        pytest.param(
            "zzz", r"unknown reward 'zzz'\. Known: boxed, think_answer_tags, code, .*; your own: package", id="far_off"
        ),
        pytest.param("a.b.c", r"unknown reward 'a\.b\.c'", id="no_colon"),
        pytest.param("a b:c", r"unknown reward 'a b:c'", id="no_module_name"),
        pytest.param("a/b:c", r"unknown reward 'a/b:c'", id="a file of another kind"),
        pytest.param("", r"unknown reward ''", id="empty"),
    ],
)
def test_names_that_cannot_be_a_reward(name, message):
    with pytest.raises(ConfigError, match=message):
        find_import_path(name)
    with pytest.raises(ConfigError, match=message):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "no_such_module_anywhere:score", "cannot import no_such_module_anywhere: ModuleNotF", id="no_module"
        ),
        pytest.param("no/such.py:score", "cannot import no/such.py: FileNotFoundError", id="no_file"),
        pytest.param(
            "megarl.rewards.functions.marked_answers:boxer",
            "has no function 'boxer'; did you mean 'boxed'",
            id="no_function",
        ),
    ],
)
def test_paths_that_lead_nowhere(name, message):
    assert find_import_path(name) == name
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_reward_processes_import_neither_torch_nor_engines():
    script = (
        "import sys; import megarl.rewards.scoring.reward_pool, megarl.rewards.scoring.reward_main; "
        "import megarl.processes.child; "
        "light = set(sys.modules); "
        "from megarl.rewards import REWARDS, resolve; [resolve(name) for name in REWARDS]; "
        "heavy = {'torch', 'vllm', 'megatron', 'transformers'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); assert 'sympy' not in light"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
