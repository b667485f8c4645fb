"""Environments by name: the table, import paths, files, and what is refused before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.environments import ENVIRONMENTS, Start, Step, Turn, find_environment
from megarl.types import ConfigError, Problem

GAME = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Score:
    points: int = 0

class Game:
    async def reset(self, problem, seed): ...
    async def step(self, turn): ...
    async def close(self): ...

class Half:
    async def reset(self, problem, seed): ...
    def step(self, turn): ...

function = print
"""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_all_in_the_table_are_found(name: str) -> None:
    assert callable(find_environment(name))


async def test_a_single_turn_is_done_after_one_step() -> None:
    environment = find_environment("single_turn")()
    messages = ({"role": "user", "content": "2 + 2"},)
    assert await environment.reset(Problem(0, messages, (1,), "4"), 5) == Start(messages)
    assert await environment.step(Turn(0, "4", "stop")) == Step(done=True)
    await environment.close()


def test_a_class_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    assert find_environment(f"{tmp_path}/game.py:Game").__name__ == "Game"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("single_trun", ["Did you mean 'single_turn'?", "path/to/file.py:Class"], id="not in the table"),
        pytest.param("{folder}/absent.py:Game", ["absent.py", "no such file"], id="no file"),
        pytest.param("{folder}/game.py:Gone", ["has no class 'Gone'"], id="no class"),
        pytest.param("{folder}/game.py:Half", ["lacks `async def` close"], id="no method"),
        pytest.param("{folder}/game.py:function", ["is not a class"], id="a function"),
        pytest.param("{folder}/raises.py:Game", ["ZeroDivisionError"], id="raises"),
        pytest.param("megarl.absent:Game", ["megarl.absent"], id="no module"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "raises.py").write_text("1 / 0")
    with pytest.raises(ConfigError) as caught:
        find_environment(name.format(folder=tmp_path))
    assert caught.value.exit_code == 2
    for word in ["rollout.environment", *words]:
        assert word in str(caught.value)
