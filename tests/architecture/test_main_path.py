"""The main path of training knows no optional feature: parts are chosen in `training/parts/choice` and its like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
MAIN_PATH = [
    "loops/rl.py",
    "loops/on_policy.py",
    "loops/step.py",
    "loops/started_run.py",
    "training/training_engine.py",
    "training/optimizer_step.py",
    "training/gradient_reduction.py",
    "training/model.py",
    "training/rows/packed_rows.py",
    "training/rows/microbatch.py",
    "training/objective.py",
    "models/policy.py",
    "cluster/rank_model.py",
    "reshard/live.py",
    "reshard/transport.py",
    "reshard/plan.py",
    "reshard/overlap.py",
    "reshard/staging.py",
    "rollout/pool.py",
    "rollout/requests/queues.py",
    "rollout/requests/request_table.py",
    "cluster/reshard_calls.py",
    "worker/reshard/rank_reshard.py",
    "worker/reshard/cross_world_reshard.py",
    "worker/colocated.py",
    "worker/engine_worker.py",
    "worker/trainer_worker.py",
    "worker/rank_state.py",
    "worker/trainer_part.py",
    "engine/engine.py",
    "engine/leader_requests.py",
    "engine/executor.py",
    "engine/vllm_arguments.py",
]
FEATURES = re.compile(
    r"trees?|prefix(es)?|routes?|replay\w*|mtp|distil\w*|teachers?|fp8|quantis\w*|lora|adapters?|delta|exact\w*"
    r"|fingerprints?|checksums?|canary|drafters?|eagle\d?"
)
"""Words that name an optional feature."""
OTHER_MEANINGS = re.compile(r"chunk_prefix|sharded_state_dict\(.*prefix|removeprefix|prefix[_ ]cach\w*")
"""Names with such a word that mean something else: the beginning of a name, and vLLM's cache of keys and values."""


def named_features(text: str) -> list[str]:
    """Return the lines of a module in which a feature is named, with their numbers."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.findall(r"[a-z][a-z0-9]*", OTHER_MEANINGS.sub("", line).lower())
        if any(FEATURES.fullmatch(word) for word in words):
            lines.append(f"{number}: {line.strip()}")
    return lines


@pytest.mark.parametrize("module", MAIN_PATH)
def test_the_main_path_names_no_optional_feature(module: str) -> None:
    assert named_features((PACKAGE / module).read_text()) == []


def test_the_loops_name_no_observer_of_a_step() -> None:
    """Observers are chosen in `loops/observers/selection`; a loop calls all of them through one interface."""
    names = {path.stem for path in (PACKAGE / "loops/observers").glob("[!_]*.py")} - {"step_observer", "selection"}
    assert {"canary", "instabilities", "step_checks", "step_recorder", "weight_checks"} <= names
    words = re.compile("|".join(f"{name}|{name.title().replace('_', '')}" for name in names))
    for module in ("rl", "on_policy", "sft", "preference", "distillation", "started_run", "run_data", "step"):
        text = (PACKAGE / f"loops/{module}.py").read_text()
        assert words.findall(text) == [], module


def test_a_named_feature_is_noticed() -> None:
    text = "a = row.tree\nself.expert_routes = ()\nchunk_prefix(0, 1)\n# like FP8\nrouters\n"
    assert [line.partition(":")[0] for line in named_features(text)] == ["1", "2", "4"]


MTP_PLACES = {
    "config/sections/rollout.py",
    "config/sections/trainer.py",
    "families/draft_layers.py",
    "families/mtp.py",
    "loops/saving/changed_recipe.py",
    "models/drafts/mtp.py",
    "models/parts.py",
    "preflight/model/draft_layers.py",
    "training/parts/choice.py",
    "training/parts/mtp.py",
}
"""The parts of multi-token prediction, their checks and recipe fields, and the places that choose parts."""
MTP_DATA = ("families/pages/", "families/reading.py", "config/hints/foreign.py", "config/override.py")
"""Data of families and of other programs: names of fields and prefixes of tensors."""


def test_multi_token_prediction_is_named_where_parts_are_chosen() -> None:
    """All other modules know draft layers (`families.draft_layers`), of whatever kind."""
    name = re.compile(r"mtp|nextn|multi[-_ ]token", re.IGNORECASE)
    modules = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    naming = {module for module, text in modules.items() if name.search(text)}
    assert {module for module in naming if not module.startswith(MTP_DATA)} == MTP_PLACES


def test_delta_nets_are_named_where_parts_are_chosen() -> None:
    """All other modules know linear attention (`families.linear_attention`), of whatever kind."""
    name = re.compile(r"delta[-_]?nets?|gdn_attention", re.IGNORECASE)
    modules = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    naming = {module for module, text in modules.items() if name.search(text)}
    other_modules = {module for module in naming if not module.startswith(("families/pages/", "models/delta_net/"))}
    assert other_modules == {
        "families/delta_net.py",
        "families/linear_attention.py",
        "models/layer_specs.py",
        "platform/cpu/delta_net.py",
        "platform/cpu/vllm_patches.py",
    }
