"""Old names of reward modules. Users' reward files and recipes with these names still run, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {
    "megarl.rewards.answer_format": "megarl.rewards.functions.answer_format",
    "megarl.rewards.boxed": "megarl.rewards.functions.marked_answers",
    "megarl.rewards.calling": "megarl.rewards.scoring.calling",
    "megarl.rewards.code": "megarl.rewards.functions.code",
    "megarl.rewards.gsm8k": "megarl.rewards.functions.gsm8k",
    "megarl.rewards.length": "megarl.rewards.functions.length",
    "megarl.rewards.math_competition": "megarl.rewards.functions.math_competition",
    "megarl.rewards.math_equivalence": "megarl.rewards.maths.agreement",
    "megarl.rewards.math_verify": "megarl.rewards.functions.math_verify",
    "megarl.rewards.multiple_choice": "megarl.rewards.functions.multiple_choice",
    "megarl.rewards.results": "megarl.rewards.scoring.results",
    "megarl.rewards.think_answer_tags": "megarl.rewards.functions.marked_answers",
}
"""Old and new name of modules with functions that users call."""


class _MovedModules(MetaPathFinder, Loader):
    """Imports a moved module under its old name, with the same contents."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new_name = _MOVED[module.__name__]
        # Level 2 is importlib: warnings skip its frames, so that the user's line is shown.
        warnings.warn(f"{module.__name__} moved: import {new_name}", DeprecationWarning, stacklevel=2)
        contents = vars(importlib.import_module(new_name))
        module.__dict__.update({name: value for name, value in contents.items() if not name.startswith("__")})


def find_moved_modules() -> None:
    """Make the old names importable, unless a file has the name."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
