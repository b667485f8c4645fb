"""Templates of the teachers' prompts (`distillation.teacher_prompt`), and their faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

RECORD = "record."
"""Prefix of context sources that are fields of the record."""
CONTEXTS = ("success", "feedback")
"""All other context sources."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NAMES = ("prompt", "context")


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replace each {NAME} by its value. Placeholders inside values stay."""
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], template)


def template_faults(template: str, context: tuple[str, ...]) -> Iterator[str]:
    """Yield the faults of a template and of its context sources."""
    names = _PLACEHOLDER.findall(template)
    field = f"distillation.teacher_prompt = {template!r}"
    for name in dict.fromkeys(name for name in names if name not in _NAMES):
        yield f"{field}: {{{name}}} is not a placeholder; write {{prompt}} or {{context}}"
    if "prompt" not in names:
        yield f"{field}: lacks {{prompt}}, so the teacher would not read the question; add it"
    if "context" in names and not context:
        yield f"{field}: has {{context}}, but distillation.context is empty; give its parts, such as [record.solution]"
    if "context" not in names and context:
        yield f"{field}: lacks {{context}}, so distillation.context has no effect; add it, or leave the context out"
    for source in context:
        if source not in CONTEXTS and (not source.startswith(RECORD) or source == RECORD):
            yield (
                f"distillation.context = {source}: is not a context; use success, feedback, or record.NAME for a field "
                "of the record"
            )
    if repeated_sources := sorted({source for source in context if context.count(source) > 1}):
        yield f"distillation.context = {list(context)}: names {', '.join(repeated_sources)} twice; name each once"
