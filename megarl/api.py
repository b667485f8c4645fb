"""megarl from a Python program or a notebook: `megarl.train`, `plan`, `evaluate` and `load_run`.

    import megarl

    if __name__ == "__main__":
        run = megarl.train("recipe.yaml", {"train.steps": 3, "reward.functions": [my_reward]})
        print(run.metrics().select(["step", "reward/mean"]))

Calls that train or sample run the command of the same name in a separate process. They do not disturb a notebook, nor a
program with an event loop and signal handlers.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.config.reading.override_text import as_yaml, override_text
from megarl.files import shipped
from megarl.files.import_path import source_being_imported
from megarl.files.private_folder import PrivateFolder
from megarl.platform.commands import follow_command
from megarl.terminal import printable
from megarl.types import ConfigError, MegarlError

if TYPE_CHECKING:
    import pyarrow as pa

RecipeSource = str | Path | Mapping[str, Any]
"""YAML file of a recipe, a name listed by `megarl recipes`, or the recipe's sections as a mapping."""
_SHOWN_LINES = 20
"""Lines of output shown if a command ended without a message, for example because it was killed."""
Overrides = Mapping[str, Any]
"""Values by dotted field name. Where a field takes an import path, the function or class itself may be passed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder: finished, stopped or still active. Each method reads the files again."""

    path: Path

    @property
    def recipe(self) -> dict[str, Any]:
        """Fields of the run's recipe by dotted name."""
        return dict(self._read().config)

    @property
    def state(self) -> str:
        """State of the run, like `running`, `done` or `failed`; `ended unseen`: its process is gone without a
        report.
        """
        return self._read().state

    @property
    def parent(self) -> str | None:
        """Run and step that this run was forked from, as text, or None."""
        return self._read().parent or None

    @property
    def model(self) -> Path | None:
        """Folder of the exported Hugging Face model, or None."""
        folder = self.path / "hf"
        return folder if folder.is_dir() else None

    def metrics(self) -> pa.Table:
        """Return a table with one row per step: the column `step`, and one column per metric of METRICS.md.

        A cell is null where a step has no value.
        """
        return _make_table([{"step": step, **values} for step, values in self._read().rows])

    def samples(self, step: int | None = None) -> pa.Table:
        """Return the recorded samples of a step; None: of all steps. Objects and lists become JSON text.

        Raises ConfigError if the step has no recorded samples.
        """
        from megarl.report.samples import read_records

        files = dict(self._read().sample_files)
        if step is not None and step not in files:
            recorded_steps = ", ".join(map(str, sorted(files))) or "none"
            raise ConfigError(f"step = {step}: {self.path} has no samples of this step; it has steps {recorded_steps}")
        steps = sorted(files) if step is None else [step]
        return _make_table([record for number in steps for record in read_records(files[number], number)])

    def _read(self) -> Any:
        from megarl.tracking.run_record import RunRecord

        return RunRecord.open(self.path)


def train(
    recipe: RecipeSource,
    overrides: Overrides | None = None,
    *,
    resume: bool | Literal["must"] = False,
    restart: bool = False,
) -> Run:
    """Run `megarl train` in a separate process, show its output here, and return the finished run.

    The training continues if this process is killed. `resume` continues the run from its newest checkpoint; `restart`
    moves an earlier run aside. Raises ConfigError, else the subclass of MegarlError with the command's exit code.
    """
    options = ["--resume=must"] if resume == "must" else ["--resume"] * resume
    with _recipe_file(recipe) as file:
        override_texts = _override_texts(overrides)
        folder = _run_path(file, override_texts)
        _run_megarl("train", file, *override_texts, *options, *["--restart"] * restart)
    return Run(folder)


def plan(recipe: RecipeSource, overrides: Overrides | None = None) -> dict[str, Any]:
    """Return the plan of a recipe without starting it: the object printed by `megarl plan --json`.

    It has memory by phase in bytes, `fits`, and the bytes and seconds of a weight update of the engines. Raises
    ConfigError for a recipe that cannot run.
    """
    with _recipe_file(recipe) as file:
        exit_code, output, error_output = _run_program(
            "plan", file, *_override_texts(overrides), "--json", captures_output=True
        )
    # A plan that does not fit has exit code 2 too, but prints its object.
    if exit_code and not output.strip():
        raise _make_error(exit_code, error_output)
    return json.loads(output)


def evaluate(
    model: str | Path | Run,
    recipe: RecipeSource,
    overrides: Overrides | None = None,
    *,
    n: int | None = None,
    temperature: float | None = None,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Evaluate a model or a run on a recipe's validation sets, as `megarl eval` does.

    `n` is the number of attempts per problem. `sets` are names of validation sets; empty: all. `out` is a new folder
    for the results (default: a folder in evaluations/ of the run, or of the current folder). Returns the contents of
    its metrics.json: the measures of each set with 95 % intervals. Raises the errors of `megarl eval`.
    """
    source = model.path if isinstance(model, Run) else Path(model)
    parent_folder = source / "evaluations" if isinstance(model, Run) else Path("evaluations")
    # Two evaluations of one model may begin in one second.
    folder = (
        Path(out)
        if out is not None
        else parent_folder / f"{source.name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}"
    )
    options = [] if n is None else ["--n", str(n)]
    options += [] if temperature is None else ["--temperature", str(temperature)]
    options += [argument for name in sets for argument in ("--set", name)]
    with _recipe_file(recipe) as file:
        _run_megarl("eval", source, file, *_override_texts(overrides), *options, "--out", folder)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def load_run(path: str | Path) -> Run:
    """Return the run in a folder. Raises ConfigError if the folder is not a run folder."""
    from megarl.tracking.run_record import refuse_other_folders

    refuse_other_folders(Path(path))
    return Run(Path(path))


@contextmanager
def _recipe_file(recipe: RecipeSource) -> Iterator[str]:
    """Yield the path of a recipe's file. A mapping is written to a temporary file.

    Raises ConfigError while megarl imports a function from the calling file: each import would start another command,
    without end.
    """
    if source := source_being_imported():
        raise ConfigError(
            f"{source} calls megarl while megarl imports it for a function of a recipe; put the call below "
            '`if __name__ == "__main__":`'
        )
    if not isinstance(recipe, Mapping):
        yield shipped.recipe_file(str(recipe))
        return
    with PrivateFolder() as folder:
        file = folder / "recipe.yaml"
        file.write_text(as_yaml(_to_json_value(recipe)), encoding="utf-8")
        yield str(file)


def _override_texts(overrides: Overrides | None) -> list[str]:
    return [override_text(name, _to_json_value(value)) for name, value in (overrides or {}).items()]


def _to_json_value(value: Any) -> Any:
    """Return a JSON value: functions and classes become import paths, paths become texts."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(inner_value) for key, inner_value in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(inner_value) for inner_value in value]
    if isinstance(value, Path):
        return str(value)
    return _import_path(value) if callable(value) else value


def _import_path(function: Callable[..., Any]) -> str:
    """Return the import path of a function or class: `package.module:NAME` inside a package, else `FILE.py:NAME`."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not file.endswith(".py") or not Path(file).is_file() or not name.isidentifier():
        raise ConfigError(
            f"the function {name}: other processes cannot import it; define it at the top level of a Python file. "
            "In a notebook, write its cell to a file: begin the cell with `%%writefile my_functions.py`, then run "
            "`from my_functions import NAME` in the next one"
        )
    module = inspect.getmodule(function)
    # A module of a package may have relative imports, so it cannot be imported from its file alone.
    is_in_package = module is not None and bool(module.__package__) and module.__name__ != "__main__"
    return f"{module.__name__}:{name}" if module is not None and is_in_package else f"{Path(file).resolve()}:{name}"


def _run_path(recipe: str, overrides: Sequence[str]) -> Path:
    from megarl.config.recipe import load
    from megarl.tracking.run_folder import run_path

    path = Path(recipe)
    return path if path.is_dir() else run_path(load(path, overrides))


def _run_megarl(*arguments: str | Path) -> None:
    exit_code, _, error_output = _run_program(*arguments, captures_output=False)
    if exit_code:
        raise _make_error(exit_code, error_output)


def _run_program(*arguments: str | Path, captures_output: bool) -> tuple[int, str, str]:
    """Run a megarl command. Returns exit code, standard output if captured, error output."""
    return follow_command([sys.executable, "-m", "megarl", *map(str, arguments)], captures_output=captures_output)


def _make_error(code: int, error_output: str) -> MegarlError:
    """Return the exception class of an exit code, with the message that the command printed last."""
    error_classes = [MegarlError]
    for error_class in error_classes:
        error_classes += error_class.__subclasses__()
    error_class = next((error_class for error_class in error_classes if error_class.exit_code == code), MegarlError)
    plain_output = printable(error_output)
    # The command's message is its last output. It follows `error: ` at the beginning of a line.
    messages = re.split(r"^error: ", plain_output, flags=re.MULTILINE)[1:]
    if messages:
        return error_class(messages[-1].strip())
    last_lines = "\n".join(plain_output.splitlines()[-_SHOWN_LINES:])
    return error_class(f"megarl ended with exit code {code}; its last lines:\n{last_lines}")


def _make_table(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return records as a table with a column for every key, in order of appearance. Missing values are null."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: _make_column([record.get(name) for record in records]) for name in names}
    return pa.table(columns)


def _make_column(values: Sequence[Any]) -> pa.Array:
    """Return values as an Arrow array. Objects, lists and values of several types become JSON text."""
    import pyarrow as pa

    value_types = {type(value) for value in values if value is not None}
    exceeds_int64 = any(type(value) is int and not -(2**63) <= value < 2**63 for value in values)
    if (value_types <= {int, float} and not exceeds_int64) or (len(value_types) == 1 and value_types <= {str, bool}):
        return pa.array([float(value) if value is not None and float in value_types else value for value in values])
    return pa.array(
        [
            None if value is None else value if value_types == {str} else json.dumps(value, ensure_ascii=False)
            for value in values
        ]
    )
