"""A function of the user's own, named as `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.types import ConfigError


def is_import_path(name: str) -> bool:
    """Whether a name is of one of the two forms; whether there is such a function is not looked at."""
    source, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        return False
    return source.endswith(".py") or all(part.isidentifier() for part in source.split("."))


def function_of(name: str, table: Mapping[str, Callable[..., Any]], field: str) -> Callable[..., Any]:
    """The table's function of that name, or else the user's own; errors as of `import_function`."""
    return table[name] if name in table else import_function(name, field)


def import_function(name: str, field: str) -> Callable[..., Any]:
    """The function at an import path; runs its module, once in a process.

    A file's path is relative to the current folder. Raises ConfigError, which begins with the `field` that names it, if
    the module cannot be imported or has no such function.
    """
    source, _, function_name = name.rpartition(":")
    try:
        module = _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: {name!r}: cannot import {source}: {cause}") from error
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    nearest = difflib.get_close_matches(function_name, [key for key in vars(module) if not key.startswith("_")], n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ConfigError(f"{field}: {name!r}: module {source} has no function {function_name!r}{hint}")


def _module_of_file(path: Path) -> ModuleType:
    """The module of a Python file, under a name that no other file has."""
    absolute = path.resolve(strict=True)
    name = f"{path.stem}_{hashlib.sha256(str(absolute).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, absolute)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the module look their annotations up here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
