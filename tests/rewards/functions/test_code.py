"""The reward `code`: solutions that pass, fail, wait and attack, called and in a reward process."""

import contextlib
import json
import sys
import time

import pytest

from megarl.rewards.functions.code import code
from megarl.rewards.functions.code_programs import long_integers
from megarl.rewards.scoring.results import function_metrics
from megarl.sandbox.sandbox import Sandbox, SandboxSettings
from tests.rewards.pools import all_scored, pool_of

SUMS = {"inputs": ["2 3\n", "5 6\n", "10 -4\n"], "outputs": ["5\n", "11\n", "6\n"]}
RIGHT = "Add them.\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TWO_SUM = {"inputs": [[[2, 7, 11], 9], [[3, 3], 6]], "outputs": [[0, 1], [0, 1]], "fn_name": "two_sum"}
with long_integers():
    LONG = str(2**20000)
SOLUTION = """```python
class Solution:
    def two_sum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for place, number in enumerate(nums):
            print("on the way", number)
            if target - number in seen:
                return seen[target - number], place
            seen[number] = place
```"""


@pytest.fixture(scope="module")
def sandbox():
    with contextlib.closing(Sandbox(SandboxSettings(timeout_seconds=0.9, total_timeout_seconds=9.0))) as made:
        yield made


def block(source):
    return f"```python\n{source}\n```"


def test_a_right_program(sandbox):
    reward = code(RIGHT, SUMS, {}, sandbox, correct_score=10.0)
    assert (reward.score, reward.format_valid, reward.answer_correct) == (10.0, True, True)
    assert reward.metrics["passed"] == 1.0 and reward.metrics["unrun"] == 0.0
    assert 0 < reward.metrics["cpu_seconds"] < 1


@pytest.mark.parametrize(
    "completion",
    [
        pytest.param(SOLUTION, id="class Solution"),
        pytest.param(
            block("def two_sum(nums, target):\n    return np.array([0, nums.index(target - nums[0], 1)]).tolist()"),
            id="function and numpy",
        ),
    ],
)
def test_a_right_function(sandbox, completion):
    assert code(completion, TWO_SUM, {}, sandbox).score == 1.0


@pytest.mark.parametrize(
    ("source", "shares"),
    [
        pytest.param("print(5)", {"passed": 1, "wrong": 2}, id="one right"),
        pytest.param("a, b = input().split()\nprint(5 if a == '2' else 1 / 0)", {"passed": 1, "runtime_errors": 2},
                     id="errors"),
        pytest.param("print(5)\nif input()[0] == '5':\n    while True: pass", {"passed": 1, "timeouts": 1, "unrun": 1},
                     id="time-out"),
    ],
)  # fmt: skip
def test_the_part_of_the_tests_that_pass(sandbox, source, shares):
    reward = code(block(source), SUMS, {}, sandbox, score="fraction")
    assert reward.score == pytest.approx(1 / 3) and not reward.answer_correct and reward.format_valid
    names = ("passed", "wrong", "runtime_errors", "timeouts", "unrun")
    assert {name: round(3 * reward.metrics[name]) for name in names if reward.metrics[name] > 0.01} == shares


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        pytest.param("print(4)\nexit()", "4", id="exit"),
        pytest.param("print(4)\nexit(0)\nprint(5)", "4", id="exit 0"),
        pytest.param("print(4)\nquit()", "4", id="quit"),
        pytest.param("n = int(input())\nif n == 0:\n    print(4)\n    exit()\nprint(n)", "4", id="early end"),
        pytest.param("def f():\n    print(4)\n    quit(None)\nf()", "4", id="in a function"),
        pytest.param("try:\n    exit()\nfinally:\n    print(4)", "4", id="finally"),
        pytest.param("try:\n    exit()\nexcept SystemExit:\n    print(4)", "4", id="caught"),
        pytest.param("print(4)\nimport builtins\nbuiltins.exit()", "4", id="of builtins"),
        pytest.param("input()\ntry:\n    input()\nexcept EOFError:\n    print(4)\n    exit()", "4", id="end of input"),
        pytest.param("print(4)\nexit(1)", None, id="exit 1"),
        pytest.param("print(4)\nquit('fault')", None, id="quit with a text"),
        pytest.param("print(2 ** 20000)", LONG, id="6,021 digits"),
        pytest.param("print(int('7' * 5000) % 9)", "8", id="long text read"),
        pytest.param("import math\nprint(len(str(math.factorial(3000))))", "9131", id="length of a factorial"),
        pytest.param("print(int(input()) + 2 ** 20000)", LONG, id="sum"),
    ],
)
def test_programs_end_and_count_as_under_any_python(sandbox, source, printed):
    reward = code(block(source), {"inputs": ["0\n"], "outputs": [printed or "4"]}, {}, sandbox)
    assert reward.answer_correct == (printed is not None), reward


def test_long_integers_are_arguments_and_results(sandbox):
    """As numbers of the record, as JSON text, and as the answer's own JSON."""
    number = 2**20000
    double = block("def f(n):\n    return 2 * n")
    as_numbers = {"inputs": [[number]], "outputs": [2 * number], "fn_name": "f"}
    with long_integers():
        as_text = {"inputs": [LONG], "outputs": [str(2 * number)], "fn_name": "f"}
        as_json = json.dumps(as_numbers)
    wrong = {"inputs": [[number]], "outputs": [2 * number + 1], "fn_name": "f"}
    found = [code(double, given, {}, sandbox) for given in (as_text, as_numbers, as_json, wrong)]
    assert [reward.answer_correct for reward in found] == [True, True, True, False], found
    assert len(LONG) == 6021 and sys.get_int_max_str_digits() == sys.int_info.default_max_str_digits


def test_results_of_numpy_are_what_they_hold(sandbox):
    shapes = {"inputs": [[0], [1], [2]], "outputs": [7, [[1, 2], [3, 4]], [1.5, True]], "fn_name": "f"}
    source = "import numpy\ndef f(n):\n    held = (numpy.int64(7), numpy.array([[1, 2], [3, 4]]))\n" + (
        "    return held[n] if n < 2 else (numpy.float32(1.5), numpy.bool_(True))"
    )
    assert code(block(source), shapes, {}, sandbox).score == 1.0


def test_a_result_that_breaks_the_comparison_is_wrong(sandbox, monkeypatch):
    halves = {"inputs": [[0]], "outputs": [0.5], "fn_name": "f"}
    huge = block("def f(n): return 10 ** 400")
    reward = code(huge, halves, {}, sandbox)
    assert (reward.score, reward.metrics["wrong"], reward.metrics["judge_errors"]) == (0.0, 1.0, 0.0)
    # Anything else that may raise is no way out, either.
    monkeypatch.setattr("megarl.rewards.functions.code_programs._ABSOLUTE", None)
    reward = code(huge, halves, {}, sandbox)
    assert (reward.score, reward.metrics["wrong"], reward.metrics["judge_errors"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("most", [0, -1])
def test_no_tests_are_no_tests_passed(sandbox, most):
    with pytest.raises(ValueError, match=rf"max_tests = {most}"):
        code(RIGHT, SUMS, {}, sandbox, max_tests=most)


def test_all_or_nothing_ends_with_the_first_failure(sandbox):
    reward = code(block("print(6)"), SUMS, {}, sandbox)
    assert reward.score == 0.0 and reward.metrics["unrun"] == pytest.approx(2 / 3)
    assert code(block("print(5)"), SUMS, {}, sandbox, max_tests=1).score == 1.0


def test_without_a_block_there_is_nothing_to_run(sandbox):
    reward = code("print(5)", SUMS, {}, sandbox)
    assert (reward.score, reward.format_valid, reward.answer_correct) == (0.0, False, False)
    assert reward.metrics["unrun"] == 1.0 and reward.metrics["passed"] == 0.0


def test_time_outs_by_the_clock_are_told_from_those_of_cpu_time():
    limits = SandboxSettings(timeout_seconds=0.3, wall_timeout_seconds=0.4, longest_seconds=60.0, packages=())
    with contextlib.closing(Sandbox(limits)) as sandbox:
        waits = code(block("import time\ntime.sleep(3600)"), SUMS, {}, sandbox, max_tests=1).metrics
        computes = code(block("while True: pass"), SUMS, {}, sandbox, max_tests=1).metrics
    assert (waits["timeouts"], waits["wall_timeouts"]) == (1.0, 1.0)
    assert (computes["timeouts"], computes["wall_timeouts"]) == (1.0, 0.0)


def test_time_is_bounded_over_all_tests():
    many = {"inputs": ["0"] * 20, "outputs": ["1"] * 20}
    slow = block("import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(1)")
    with contextlib.closing(Sandbox(SandboxSettings(total_timeout_seconds=0.8, packages=()))) as sandbox:
        reward = code(slow, many, {}, sandbox)
    assert reward.score == 0.0 and reward.metrics["timeouts"] > 0 and reward.metrics["unrun"] > 0.5
    assert reward.metrics["cpu_seconds"] < 2.0


ATTACKS = [
    pytest.param("import os\nprint('{\"passed\": true}', flush=True)\nos._exit(0)", id="exit"),
    pytest.param("class Any(str):\n    def __eq__(self, other): return True\nprint(Any('x'))", id="__eq__"),
    pytest.param("import builtins\nbuiltins.print = lambda *a: None\nbuiltins.input = lambda: 'x'", id="builtins"),
    pytest.param("import sys\nsys.exit(0)", id="sys.exit"),
    pytest.param("open('/tmp/reward.txt', 'w').write('1.0')", id="file"),
    pytest.param("print('nan')", id="nan"),
]


@pytest.mark.parametrize("source", ATTACKS)
def test_an_attack_earns_nothing(sandbox, source):
    assert code(block(source), SUMS, {}, sandbox, score="fraction").score == 0.0


@pytest.mark.parametrize("source", ATTACKS)
def test_an_attack_from_a_function_earns_nothing(sandbox, source):
    inside = "def two_sum(*given):\n    " + source.replace("\n", "\n    ")
    assert code(block(inside), TWO_SUM, {}, sandbox, score="fraction").score == 0.0
    equal = "class Any(list):\n    def __eq__(self, other): return True\ndef two_sum(*given): return Any()"
    assert code(block(equal), TWO_SUM, {}, sandbox, score="fraction").score == 0.0


async def test_the_time_of_programs_comes_on_top(tmp_path):
    """A second of CPU is too much for the function, and nothing for its programs."""
    slow = block("import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\nprint(1)")
    tests = {"inputs": ["0"], "outputs": ["1"]}
    with pool_of("code", timeout_seconds=1.0) as pool:
        assert (await all_scored(pool, slow, answer=tests))[0].reward.score == 1.0


async def test_in_a_reward_process():
    rewards = {"functions": [{"name": "code", "kwargs": {"score": "fraction"}}], "timeout_seconds": 5.0}
    with pool_of(**rewards) as pool:
        half = block("print(5 if input()[0] == '2' else 11)")
        scored = await all_scored(pool, RIGHT, half, "nothing", answer=SUMS)
    assert [one.failure for one in scored] == [None, None, None]
    assert [one.reward.score for one in scored] == [1.0, pytest.approx(2 / 3), 0.0]
    metrics = function_metrics([one.reward for one in scored])
    assert metrics["reward/code/passed"] == pytest.approx(5 / 9)
    assert metrics["reward/code/wrong"] == pytest.approx(1 / 9)
    assert metrics["reward/code/mean"] == pytest.approx(5 / 9)


async def test_a_function_of_ones_own_gets_the_sandbox(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(completion_text, sandbox):\n    return float(sandbox.run(completion_text).stdout)\n"
    )
    with pool_of(f"{tmp_path}/mine.py:mine") as pool:
        assert (await all_scored(pool, "print(6 * 7)"))[0].reward.score == 42.0


async def test_tests_that_cannot_be_read_are_an_error_and_no_zero():
    with pool_of("code") as pool:
        scored = (await all_scored(pool, RIGHT, answer="42"))[0]
    assert scored.failure == "error" and "test_cases" in scored.detail


def test_many_tests_take_a_few_milliseconds_each(sandbox):
    many = {"inputs": [f"{n} {n}\n" for n in range(60)], "outputs": [f"{2 * n}\n" for n in range(60)]}
    before = time.process_time()
    reward = code(RIGHT, many, {}, sandbox)
    assert reward.score == 1.0
    assert (reward.metrics["cpu_seconds"] + time.process_time() - before) / 60 < 0.040
