"""Prove model families on each supported version set, each in an environment of its own. Prints one table.

    launch/test.sh --matrix [--set NAME] [--family NAME] [--proof NAME]

For each set, launch/setup.sh makes the folder `.venv-matrix-SET`. Then `tests/guards` and the check `families` run in
it. A cell shows the largest difference found in a proof, and its limit where it is exceeded. Exits with 1 if a cell
fails or is missing. Needs Python alone, none of megarl's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

SETS = {"stable": "cpu", "next": "cpu-next"}
"""Version sets, each with the name of its lock files. The versions of a set are in launch/versions-SET.txt."""
INTERPRETERS = {
    name: "python" + min(path.stem.rpartition("-")[2] for path in ROOT.glob(f"launch/requirements-{lock}-[0-9]*.txt"))
    for name, lock in SETS.items()
}
"""Interpreters by version set: the oldest one that has a lock file."""
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next")
"""A dense model, a mixture of experts, latent attention, and gated delta-nets."""
PROOFS = (
    "log-probs", "rotary", "gradient", "engine", "packing", "conversion", "reshard", "layouts", "drafts", "learning",
    "replay", "critic", "preference", "lora", "export",
)  # fmt: skip
"""Proofs of the check `families`."""
LOGS = ROOT / "build/matrix"
"""Folder of each proof's output. Git ignores it."""
GUARDS = "guards"
"""Name of the row of `tests/guards`."""


class Cell(NamedTuple):
    """Outcome of a proof: the text shown, and whether the proof passed."""

    text: str
    met: bool


def versions(name: str) -> list[str]:
    """Return the pins of a version set, `package==version` each."""
    lines = (ROOT / f"launch/versions-{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def make_environment(name: str) -> Path:
    """Make the environment of a version set, or update it. Returns its interpreter.

    Raises SystemExit if the interpreter is missing or launch/setup.sh fails.
    """
    interpreter = INTERPRETERS[name]
    if shutil.which(interpreter) is None:
        raise SystemExit(f"launch/test.sh --matrix: {interpreter} is not on PATH, version set {name} needs it")
    folder = ROOT / f".venv-matrix-{name}"
    # The registry's CUDA build of torch is better than none: it computes the same on CPUs.
    settings = {"VENV": str(folder), "VERSIONS": name, "PYTHON": interpreter, "TORCH_BUILD": "any"}
    done = subprocess.run(["bash", "launch/setup.sh", "cpu,dev"], cwd=ROOT, env={**os.environ, **settings}, check=False)
    if done.returncode:
        raise SystemExit(f"launch/test.sh --matrix: launch/setup.sh failed for version set {name} (above)")
    return folder / "bin/python"


def run_in(python: Path, log: Path, *arguments: str) -> int:
    """Run an interpreter in the repository and write its output into a file. Returns its exit code."""
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    with log.open("w", encoding="utf-8") as file:
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False).returncode


def guard(python: Path, log: Path) -> Cell:
    """Run `tests/guards`. The cell shows pytest's closing line."""
    code = run_in(python, log, "-m", "pytest", "-q", "-n0", "tests/guards")
    lines = log.read_text(encoding="utf-8").splitlines()
    closing = re.sub(r" in [0-9.]+s.*", "", lines[-1]) if lines else f"exit code {code}"
    return Cell(closing.strip(), code == 0)


def prove(python: Path, family: str, proofs: Sequence[str], log: Path) -> dict[str, Cell]:
    """Run the check of a family. Returns a cell for each proof, also for those it did not come to."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        proof_options = [argument for proof in proofs for argument in ("--proof", proof)]
        command = ("tools/check.py", "families", "--json", str(file), "--only", family, *proof_options)
        run_in(python, log, *command)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return cells([json.loads(line) for line in lines], proofs, log)


def cells(rows: Sequence[Mapping[str, Any]], proofs: Sequence[str], log: Path) -> dict[str, Cell]:
    """Return a cell for each proof, or for each number type of a proof, such as `log-probs, bfloat16`.

    The cell shows the worst row, or where to read why the proof has none.
    """
    cell_of_proof = {}
    for proof in proofs:
        proof_rows = [row for row in rows if row["proof"].partition(",")[0] == proof]
        for name in dict.fromkeys(row["proof"] for row in proof_rows):
            cell_of_proof[name] = _worst([row for row in proof_rows if row["proof"] == name])
        if not proof_rows:
            cell_of_proof[proof] = Cell(f"FAILS (no result, see {log})", False)
    return cell_of_proof


def _worst(rows: Sequence[Mapping[str, Any]]) -> Cell:
    # Without an outcome, a row only says why the family refuses what the proof is about.
    judged = [row for row in rows if "met" in row]
    if not judged:
        return Cell(rows[0]["layout"], True)
    failed = [row for row in judged if not row["met"]]
    if failed:
        texts = [f"{row['found']:.2g}, limit {_short(row['limit'])}" for row in failed]
        return Cell(f"FAILS ({'; '.join(texts)})", False)
    return Cell(f"{max(row['found'] for row in judged):.2g} ok", True)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def table(outcomes: Sequence[tuple[str, str, str, Cell]]) -> Iterator[str]:
    """Yield the lines of a table of (set, family, proof, cell)."""
    rows = [
        ("set", "family", "proof", "result"),
        *((name, family, proof, cell.text) for name, family, proof, cell in outcomes),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "".join(f"{text:<{width}}  " for text, width in zip(row, widths, strict=False)) + row[3]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=INTERPRETERS, help="run this version set; repeatable")
    parser.add_argument("--family", action="append", help="prove this family; repeatable")
    parser.add_argument("--proof", action="append", choices=PROOFS, help="make this proof; repeatable")
    options = parser.parse_args(arguments)
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes, started = [], time.monotonic()
    for name in options.set or INTERPRETERS:
        python = make_environment(name)
        print(f"{name}: {INTERPRETERS[name]}, {', '.join(versions(name))}", flush=True)
        outcomes.append((name, "-", GUARDS, guard(python, LOGS / f"{name}-{GUARDS}.log")))
        for family in options.family or FAMILIES:
            cell_of_proof = prove(python, family, options.proof or PROOFS, LOGS / f"{name}-{family}.log")
            outcomes += [(name, family, proof, cell) for proof, cell in cell_of_proof.items()]
            print(
                f"{name}: {family}: {sum(cell.met for cell in cell_of_proof.values())} of {len(cell_of_proof)} proofs "
                "passed",
                flush=True,
            )
    print(*table(outcomes), sep="\n")
    num_failed = sum(not cell.met for *_, cell in outcomes)
    print(f"matrix: {len(outcomes)} cells, {num_failed} failed, {time.monotonic() - started:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
