"""The driver calls parts of a training rank by names that exist: `call("PART.METHOD")` is seen by no type checker."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent
CALL = re.compile(r'"(\w+)\.(\w+)"')


def parts() -> dict[str, str]:
    """Return the class name of each part, by the name under which the driver calls it."""
    tree = ast.parse((PACKAGE / "worker/trainer_parts.py").read_text())
    [table] = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return {ast.literal_eval(key): value.func.id for key, value in zip(table.keys, table.values, strict=True)}  # type: ignore


def methods_by_class() -> dict[str, set[str]]:
    """Return the names of the public methods that each class of the folder `worker` defines."""
    trees = [ast.parse(file.read_text()) for file in (PACKAGE / "worker").glob("*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: {child.name for child in node.body if isinstance(child, ast.FunctionDef) and child.name[0] != "_"}
        for node in classes
    }


def test_each_call_of_a_part_names_one_of_its_methods() -> None:
    classes, methods = parts(), methods_by_class()
    sources = [file.read_text() for folder in ("loops", "cluster") for file in (PACKAGE / folder).rglob("*.py")]
    calls = {match for source in sources for match in CALL.findall(source) if match[0] in classes}
    assert {part for part, _ in calls} == classes.keys() - {"teachers"}, "a part that nobody calls, or no part"
    assert [(part, method) for part, method in sorted(calls) if method not in methods[classes[part]]] == []


def test_no_part_has_the_name_of_a_method_or_a_model() -> None:
    """Parts and models are attributes of the worker; a part of such a name would replace it."""
    tree = ast.parse((PACKAGE / "worker/trainer_worker.py").read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    workers = methods_by_class()
    taken = attributes | workers["TrainerWorker"] | workers["Worker"] | {"reference", "reward_model"}
    assert parts().keys() & taken == set()
