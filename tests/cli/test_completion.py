"""A shell completes commands, options, and recipe fields as overrides, without importing torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.references.completion import override_candidates

MEGARL = Path(sys.executable).with_name("megarl")
RUN = """
import sys
from megarl.cli import main
sys.argv = ["megarl"]
try:
    main()
finally:
    print(*sorted({"torch", "transformers", "vllm", "megatron", "omegaconf"} & sys.modules.keys()), file=sys.stderr)
"""


def completed(words: list[str], *, tool: str = "bash") -> tuple[list[str], str]:
    """The candidates for the last word by typer's protocol, and the heavy modules imported for them."""
    line = " ".join(words)
    variables = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[tool]
    environment = os.environ | variables | {"_MEGARL_COMPLETE": f"complete_{tool}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.split("\n")[:-1], done.stderr.strip()


@pytest.mark.parametrize(
    "command", [["train"], ["plan"], ["show-config"], ["doctor"], ["eval", "runs/a"], ["slurm", "render"]], ids=" ".join
)
def test_commands_with_overrides_complete_fields_without_torch(command: list[str]) -> None:
    assert completed(["megarl", *command, "recipe.yaml", "trainer.t"]) == (
        ["trainer.tp=", "trainer.tp=1", "trainer.tp=default"],
        "",
    )


def test_an_unknown_option_before_the_cursor_changes_nothing() -> None:
    words = ["megarl", "train", "recipe.yaml", "--steps", "5", "trainer.rank_o"]
    assert completed(words)[0][:2] == ["trainer.rank_order=", "trainer.rank_order=tp-cp-ep-dp-pp"]


def test_other_shells_show_descriptions() -> None:
    words = ["megarl", "train", "recipe.yaml", "rollout.max_"]
    fields, heavy = completed(words, tool="fish")
    assert heavy == "" and len(fields) > 1
    assert all(line.startswith("rollout.max_") and len(line.split("\t")[1]) > 10 for line in fields)
    assert '"rollout.max_' in "\n".join(completed(words, tool="zsh")[0])


@pytest.mark.parametrize(
    ("given", "incomplete", "values"),
    [
        ([], "tr", ["trackers=", "trainer.", "train."]),
        ([], "~trainer.t", ["~trainer.tp"]),
        ([], "trainer.fp8=", ["trainer.fp8=none", "trainer.fp8=blockwise", "trainer.fp8=default"]),
        ([], "no_section.", []),
        ([], "no_field=", []),
        # As bash splits words at equals signs: `trainer.fp8=`, `trainer.fp8=n`, `name=seed loo`.
        (["trainer.fp8"], "", ["none", "blockwise", "default"]),
        (["trainer.fp8", "="], "n", ["none", "blockwise", "default"]),
        (["name", "=", "seed"], "loo", ["loop=", "loop=rl"]),
        (["trainer.tp=2"], "loo", ["loop=", "loop=rl"]),
    ],
)
def test_candidates(given: list[str], incomplete: str, values: list[str]) -> None:
    found = [value for value, _ in override_candidates(given, incomplete)]
    # `loop` has more values: the first ones show which field was recognised.
    assert (found[:2] if values[:1] == ["loop="] else found) == values


def test_a_section_alone_is_replaced_by_its_fields() -> None:
    found = [value for value, _ in override_candidates([], "rollout.sa")]
    assert len(found) > 5 and all(value.startswith("rollout.sampling.") and value.endswith("=") for value in found)


def test_bash_completes_after_an_installation(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMP_")}
    environment |= {"HOME": str(tmp_path), "PATH": f"{MEGARL.parent}:{environment['PATH']}"}

    def bash(script: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout.splitlines()

    # Without the last command bash would exec megarl, and no shell would be there to detect.
    assert "bash completion installed" in bash("megarl --install-completion; true")[0]
    words = shlex.join(["megarl", "train", "recipe.yaml", "trainer.fp8", "=", "b"])
    assert bash(
        f"source ~/.bashrc; COMP_WORDS=({words}); COMP_CWORD=5; _megarl_completion megarl; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    ) == ["blockwise"]
