"""Every field of vLLM's EngineArgs has one verdict: accepted, set by a recipe field or by megarl, or refused."""

from __future__ import annotations

import re

from megarl.config.libraries import engine_fields
from megarl.config.libraries.engine_fields import accepted_fields, engine_field_fault, refusals_by_field
from megarl.config.libraries.library_settings import reserved_settings
from megarl.config.schema import field_at
from megarl.preflight.libraries.library_fields import class_fields

TABLES = (engine_fields._ACCEPTED, engine_fields._SET_BY_MEGARL, engine_fields._REFUSED)


def _all_names() -> list[str]:
    return [name for table in TABLES for names in table.values() for name in names.split()] + [
        *reserved_settings("vllm")
    ]


def test_every_field_of_vllm_has_a_row() -> None:
    known = class_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    assert len(known) > 200
    assert sorted(known.keys() - {*_all_names()}) == [], (
        "decide in config/libraries/engine_fields.py what a run may do with them"
    )


def test_a_field_has_one_row() -> None:
    names = _all_names()
    assert sorted(name for name in {*names} if names.count(name) > 1) == []


def test_what_a_run_may_not_have_is_never_accepted() -> None:
    assert not accepted_fields().keys() & refusals_by_field().keys()
    # Fields that megarl itself passes to vLLM, and a cache, a scheduler and an executor of other kinds.
    for name in (
        "model",
        "load_format",
        "enable_sleep_mode",
        "kv_transfer_config",
        "scheduler_cls",
        "nnodes",
        "enable_return_routed_experts",
    ):
        assert engine_field_fault(name) is not None, name
    assert "remove it" in str(engine_field_fault("a_field_of_tomorrow"))


def test_every_fault_says_what_to_do() -> None:
    for name, fault in refusals_by_field().items():
        assert re.search(r"; remove it$|^set .* instead$", fault), (name, fault)
    named = {field for text in refusals_by_field().values() for field in re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]", text)}
    assert named
    for field in named - {"rollout.vllm.speculative_config"}:
        assert field_at(field) is not None or field.partition(".")[2] in ("sampling",), field
