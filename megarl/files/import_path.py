"""Objects that a recipe names: built-in ones by a table, or a user's object by its import path.

An import path is `package.module:name` or `path/to/file.py:name`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from megarl.files.nearest import nearest
from megarl.types import ConfigError

Kind = Literal["function", "class"]
_sources_being_imported: list[str] = []


def is_import_path(name: str, *, takes_files: bool = True) -> bool:
    """Return whether a name has the form of an import path. The object need not exist."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        return False
    if source.endswith(".py"):
        return takes_files
    return all(part.isidentifier() for part in source.split("."))


@dataclass(frozen=True, slots=True)
class Choices:
    """Valid values of a recipe field: the names in a table of import paths, or a user's import path."""

    field: str
    noun: str
    """Kind of the objects in errors, for example `a reward`."""
    kind: Kind
    table: Mapping[str, str]
    takes_files: bool = True

    def find_import_path(self, name: str) -> str:
        """Return the import path of a name, without importing it. Raises ConfigError for an unknown name."""
        path = self.table.get(name, name)
        if is_import_path(path, takes_files=self.takes_files):
            return path
        similar_name = nearest(name, self.table)
        hint = f" Did you mean {similar_name!r}?" if similar_name else ""
        attribute = "Class" if self.kind == "class" else "function"
        example = f"package.module:{attribute}" + (f" or path/to/file.py:{attribute}" if self.takes_files else "")
        raise ConfigError(
            f"{self.field}: unknown {self.noun} {name!r}.{hint} Known: {', '.join(self.table)}; your own: {example}."
        )

    def load(self, name: str) -> Callable[..., Any]:
        return import_object(self.find_import_path(name), self.field, self.kind)


def function_of(name: str, table: Mapping[str, Callable[..., Any]], field: str) -> Callable[..., Any]:
    """Return the function with this name in a table, or import the user's (`import_object`)."""
    return table[name] if name in table else import_object(name, field)


def import_object(path: str, field: str, kind: Kind = "function") -> Callable[..., Any]:
    """Import and return the function or class at an import path. Its module runs once per process.

    A file's path is relative to the current folder. Raises ConfigError if the module cannot be imported or lacks the
    object. `field` is the recipe field with the path, for the error.
    """
    source, _, attribute = path.rpartition(":")
    _sources_being_imported.append(source)
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # The module is the user's own code: it may raise anything.
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {path!r}: cannot import {source}: {cause}") from error
    finally:
        _sources_being_imported.pop()
    imported_value = getattr(module, attribute, None)
    if callable(imported_value):
        return imported_value
    member_names = [
        member_name
        for member_name, member in vars(module).items()
        if callable(member) and not member_name.startswith("_")
    ]
    similar_name = nearest(attribute, member_names)
    hint = f"; did you mean {similar_name!r}?" if similar_name else f"; give the name of a {kind}."
    if hasattr(module, attribute):
        fault = f"{attribute!r} of module {source} is not a {kind} but {type(imported_value).__name__}"
    else:
        fault = f"module {source} has no {kind} {attribute!r}"
    raise ConfigError(f"{field}: {path!r}: {fault}{hint}")


def source_being_imported() -> str | None:
    """The user's file or module that `import_object` is running, or None."""
    return _sources_being_imported[-1] if _sources_being_imported else None


def imported_object(path: str) -> Callable[..., Any] | None:
    """Return an object of a module that is already imported; no code runs."""
    source, _, attribute = path.rpartition(":")
    module = sys.modules.get(_module_name(Path(source)) if source.endswith(".py") else source)
    value = getattr(module, attribute, None)
    return value if callable(value) else None


def _module_name(path: Path) -> str:
    return f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def _module_of_file(path: Path) -> ModuleType:
    """Import a Python file as a module, once per process. Raises what the file raises."""
    file = path.resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register before it runs: dataclasses look up the module's annotations in sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A later import must run the module again instead of finding it half initialised.
        del sys.modules[name]
        raise
    return module
