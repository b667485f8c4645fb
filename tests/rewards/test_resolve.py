import subprocess
import sys

import pytest

from megarl.rewards import REWARDS, check_signature, locate, resolve
from megarl.types import ConfigError, Reward


@pytest.mark.parametrize("name", REWARDS)
def test_table_names_resolve_to_working_functions(name):
    function = resolve(name)
    assert function.__name__ == name
    assert function("no answer at all", "1", correct_score=1.0) == Reward(0.0, False, False)


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
        pytest.param("zzz", r"unknown reward 'zzz'\. Known: boxed, think_answer_tags; your own: package", id="far_off"),
        pytest.param("a.b.c", r"unknown reward 'a\.b\.c'", id="no_colon"),
        pytest.param("a b:c", r"unknown reward 'a b:c'", id="no_module_name"),
        pytest.param("", r"unknown reward ''", id="empty"),
    ],
)
def test_names_that_cannot_be_a_reward(name, message):
    with pytest.raises(ConfigError, match=message):
        locate(name)
    with pytest.raises(ConfigError, match=message):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "no_such_module_anywhere:score", "cannot import no_such_module_anywhere: ModuleNotF", id="no_module"
        ),
        pytest.param("megarl.rewards.boxed:boxer", "has no function 'boxer'; did you mean 'boxed'", id="no_function"),
    ],
)
def test_paths_that_lead_nowhere(name, message):
    assert locate(name) == name
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def keyword_only(text, answer, *, correct_score): ...


def by_position(completion, answer, correct_score=1.0, extra=None): ...


def anything(*args, **kwargs): ...


@pytest.mark.parametrize("function", [keyword_only, by_position, anything, min])
def test_signatures_that_can_be_called(function):
    check_signature("module:function", function)


def of_trl(completions, **kwargs): ...


def of_verl(data_source, solution_str, ground_truth, extra_info=None): ...


def without_score(text, answer): ...


@pytest.mark.parametrize("function", [of_trl, of_verl, without_score])
def test_signatures_of_others_are_shown_beside_the_expected_one(function):
    with pytest.raises(ConfigError) as caught:
        check_signature("my.rewards:score", function)
    told = str(caught.value)
    assert "'my.rewards:score': its signature is (" in told
    assert "def score(completion_text: str, answer: str, *, correct_score: float) -> megarl.types.Reward" in told


def test_reward_processes_import_neither_torch_nor_engines():
    script = (
        "import sys; import megarl.rewards.scoring, megarl.rewards.keeper, megarl.rewards.server; "
        "light = set(sys.modules); "
        "from megarl.rewards import REWARDS, resolve; [resolve(name) for name in REWARDS]; "
        "heavy = {'torch', 'vllm', 'megatron', 'transformers'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); assert 'sympy' not in light"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
