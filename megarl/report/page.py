"""HTML page of a report: a single file. It needs no network, and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from megarl.files.atomic import raise_storage_errors, replace_bytes
from megarl.report import curves, samples
from megarl.report.evaluation_page import evaluation_content
from megarl.report.evaluations import RecordedEvaluation, is_evaluation, read_evaluation, refuse_mixed_folders
from megarl.report.labels import distinct_labels, now_text
from megarl.report.replays import replay_contents
from megarl.report.sample_text import shortened_text
from megarl.tracking.run_record import RunRecord, StartRecord
from megarl.types import ConfigError

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript><p class="empty">This page is drawn by a script of its own, and scripts are switched off here.</p></noscript>
<div id="page"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

_NOT_SAME = ("name", "runs_folder")
"""Recipe fields that always differ between runs, so a comparison ignores them."""
_VALUE = 400
"""Maximum number of characters shown of a recipe value."""


def write_report(
    paths: Sequence[Path], out: Path | None = None
) -> tuple[Path, int, list[RunRecord] | list[RecordedEvaluation]]:
    """Write the HTML page about run folders or evaluation folders. Return its path, its size in bytes, and the data
    read.

    By default, `out` is `report.html` in the folder, or in the current folder for several folders. Raises ConfigError
    for other folders, and for a mix of runs and evaluations. Raises StorageError.
    """
    # Count a folder named twice, perhaps by a link, only once.
    distinct_paths = list({path.resolve(): path for path in paths}.values())
    target = out or (distinct_paths[0] / "report.html" if len(distinct_paths) == 1 else Path("report.html"))
    refuse_mixed_folders(distinct_paths)
    _refuse_other_files(target)
    if is_evaluation(distinct_paths[0]):
        entries = [read_evaluation(path) for path in distinct_paths]
        content = render_evaluations(entries)
    else:
        entries = [RunRecord.open(path) for path in distinct_paths]
        content = render(entries)
    with raise_storage_errors(target):
        replace_bytes(target, content)
    return target, len(content), entries


def _refuse_other_files(target: Path) -> None:
    """Raise ConfigError if `target` exists and is not an older report."""
    if not target.parent.is_dir():
        raise ConfigError(f"--out {target}: there is no folder {target.parent}; create it, or choose another")
    if target.is_dir():
        raise ConfigError(f"--out {target}: this is a folder; give a file, such as {target / 'report.html'}")
    if target.exists():
        with raise_storage_errors(target), target.open("rb") as file:
            # Do not overwrite a file named by mistake.
            is_page = file.read(len(_PAGE)).lower().startswith(b"<!doctype html")
        if not is_page:
            raise ConfigError(f"--out {target}: the file exists and is not an HTML page; choose another name")


def render(runs: Sequence[RunRecord]) -> bytes:
    labels = distinct_labels(runs)
    return _fill_page(labels, page_content(runs, labels))


def render_evaluations(evaluations: Sequence[RecordedEvaluation]) -> bytes:
    """Return the HTML page about these evaluations. The first is compared with each later one."""
    labels = distinct_labels(evaluations)
    configs = [
        [[shortened_text(name, 120), _field_text(evaluation.config, name)] for name in evaluation.config]
        for evaluation in evaluations
    ]
    # The page's script shows only recipes of runs, so pass each evaluation as a run.
    runs = [{"label": label, "config": config} for label, config in zip(labels, configs, strict=True)]
    content = {**evaluation_content(evaluations, labels), "runs": runs, "config": config_differences(evaluations)}
    return _fill_page(labels, content)


def _fill_page(labels: Sequence[str], content: Mapping[str, Any]) -> bytes:
    script, style = (files("megarl.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("js", "css"))
    # A browser runs only the script and style with these hashes, so injected text cannot run even if escaping failed.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    title = f"megarl: {', '.join(labels)}"
    page = _PAGE.format(policy=policy, title=html.escape(title), style=style, script=script, data=embed_json(content))
    # Lone surrogates in a folder's name cannot be encoded.
    return page.encode("utf-8", "replace")


def page_content(runs: Sequence[RunRecord], labels: Sequence[str]) -> dict[str, Any]:
    """Return everything that the page shows of the runs, as JSON values."""
    all_rows = [curves.with_derived(run.rows) for run in runs]
    max_points = curves.points_for(all_rows)
    return {
        "made": now_text(),
        "groups": list(curves.GROUPS),
        "charts": curves.choose_charts(all_rows),
        "points": max_points,
        "config": config_differences(runs),
        "seeds": _seed_groups(runs, labels, all_rows, max_points),
        "runs": [
            _run_json(run, label, rows, max_points) for run, label, rows in zip(runs, labels, all_rows, strict=True)
        ],
    }


def _seed_groups(
    runs: Sequence[RunRecord], labels: Sequence[str], all_rows: Sequence[curves.Rows], points: int
) -> list[dict[str, Any]]:
    """Return the groups of runs that differ only in their seed: the runs' positions, and their mean curves."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        # Runs without a readable recipe belong to no group.
        if "seed" in run.config:
            fields_without_seed = {
                name: value for name, value in run.config.items() if name not in (*_NOT_SAME, "seed")
            }
            groups.setdefault(json.dumps(fields_without_seed, sort_keys=True, default=str), []).append(position)
    return [
        {
            "label": _seeds_label({labels[position]: runs[position].config["seed"] for position in positions}),
            "runs": positions,
            "series": curves.average_over_seeds([all_rows[position] for position in positions], points),
        }
        for positions in groups.values()
        if len({runs[position].config["seed"] for position in positions}) > 1
    ]


def _seeds_label(seeds: Mapping[str, Any]) -> str:
    """Return the labels' common beginning and the seeds: `grpo, seeds 0, 1, 2`."""
    common_columns = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*seeds, strict=False))
    common_start = "".join(letters[0] for letters in common_columns).rstrip("-_./ ")
    return shortened_text(f"{common_start or 'runs'}, seeds {', '.join(map(str, seeds.values()))}", 120)


def config_differences(runs: Sequence[RunRecord] | Sequence[RecordedEvaluation]) -> list[dict[str, Any]]:
    """Return the recipe fields that differ between these runs. None: the recipe lacks the field."""
    fields = dict.fromkeys(name for run in runs for name in run.config)
    rows = [{"field": name, "values": [_field_text(run.config, name) for run in runs]} for name in fields]
    return [row for row in rows if row["field"] not in _NOT_SAME and len(set(row["values"])) > 1]


def embed_json(value: Any) -> str:
    """Return JSON that is safe inside a script element of HTML: no text ends the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # `</script>` would end the element, and in older JavaScript U+2028/2029 were line ends. So escape them.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _health_lines(findings: Any) -> list[str]:
    broken_rules = (
        [finding for finding in findings if isinstance(finding, Mapping)] if isinstance(findings, list) else []
    )
    lines = [
        f"{finding.get('rule')} after step {finding.get('step')}: {finding.get('metric')} is {finding.get('value')} "
        f"{finding.get('problem')}. Try this: {finding.get('remedy')}."
        for finding in broken_rules
    ]
    return [shortened_text(line, 1000) for line in lines]


def _run_json(run: RunRecord, label: str, rows: curves.Rows, points: int) -> dict[str, Any]:
    return {
        "label": shortened_text(label, 120),
        "path": shortened_text(str(run.path.resolve()), _VALUE),
        "parent": shortened_text(run.origin, _VALUE),
        "loop": shortened_text(str(run.config.get("loop", "")), 40),
        "model": shortened_text(str(run.config.get("model.path", "")), _VALUE),
        "state": run.state,
        "step": run.last_step,
        "steps": run.planned_steps,
        "num_logged": len(rows),
        "cause": shortened_text(str(run.status.get("cause") or ""), 2000),
        "exit_code": run.status.get("exit_code") if isinstance(run.status.get("exit_code"), int) else None,
        "rank": run.status.get("rank") if isinstance(run.status.get("rank"), int) else None,
        "health": _health_lines(run.status.get("health")),
        "notes": run.notes,
        "series": curves.series(rows, points),
        "phases": curves.phase_times(rows),
        "faults": curves.list_fault_counts(rows),
        "not_finite": curves.not_finite(rows),
        "attempts": [_start_json(run, number) for number in range(len(run.starts))],
        "checkpoints": [folder.name for folder in reversed(run.checkpoints)],
        "damaged": [folder.name for folder in run.damaged],
        "earlier": list(run.moved_aside),
        "config": [[shortened_text(name, 120), _field_text(run.config, name)] for name in run.config],
        "samples": samples.summarise_samples(run),
        "replays": replay_contents(run.path),
    }


def _start_json(run: RunRecord, start_index: int) -> dict[str, Any]:
    """Return a start's facts and its changes since the start before."""
    start = run.starts[start_index]
    start_facts = start.facts
    environment = {
        shortened_text(str(name), 80): shortened_text(value if isinstance(value, str) else json.dumps(value), _VALUE)
        for section in ("machine", "versions")
        if isinstance(start_facts.get(section), Mapping)
        for name, value in start_facts[section].items()
    }
    facts = {
        name: shortened_text(str(start_facts[name]), 2000)
        for name in ("started", "ended", "state", "cause", "exit_code", "rank", "step", "resumed_step", "command")
        if start_facts.get(name) is not None
    }
    changes = _list_recipe_changes(run.starts[start_index - 1], start) if start_index else []
    return {
        "number": start.number, **facts, "environment": environment, "changes": changes,
        "stacks": [shortened_text(name, 120) for name in start.stacks],
        "notices": [
            {"step": notice.get("step"), "text": shortened_text(str(notice.get("text", "")), _VALUE)}
            for notice in start.notices
        ],
        "is_last": start_index == len(run.starts) - 1,
    }  # fmt: skip


def _list_recipe_changes(before: StartRecord, after: StartRecord) -> list[list[str | None]]:
    # If one recipe is missing, all fields would look changed.
    names = dict.fromkeys([*before.config, *after.config]) if before.config and after.config else {}
    rows = [[name, _field_text(before.config, name), _field_text(after.config, name)] for name in names]
    return [row for row in rows if row[1] != row[2]]


def _field_text(config: Mapping[str, Any], name: str) -> str | None:
    if name not in config:
        return None
    value = config[name]
    return shortened_text(value if isinstance(value, str) else json.dumps(value, default=str), _VALUE)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
