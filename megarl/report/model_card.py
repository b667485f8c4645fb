"""Model card of an exported model: README.md with metadata for the Hub, results with intervals, recipe and versions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megarl.algorithms.estimates import Measure
from megarl.data.sources.rows import hub_data_set
from megarl.families.published import PUBLISHED, published_name
from megarl.files.atomic import raise_storage_errors, replace_text
from megarl.files.hub import is_hub_name
from megarl.files.model_folder import CARD, find_folder, read_object
from megarl.files.plain_yaml import is_too_large
from megarl.report.evaluations import is_evaluation, read_evaluation
from megarl.tracking.run_record import RunRecord
from megarl.types import DataError, MegarlError

# val/SET/data_source/NAME/reward/mean: the data source belongs to the set's name, a reward function to the measure's.
_MEASURE = re.compile(r"val/(.+?)/((?:reward/(?:[^/]+/)?)?[^/]+)")

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

_DATA_FIELD = re.compile(r"((mixture\.[^.]+\.)?data\.(train|ptx|validation(_conversations)?\.[^.]+))(\.path)?")
"""Recipe fields with a data set: its source as text, or as `path` of a mapping."""
_INHERITED = ("license", "license_name", "license_link", "language")
"""Metadata that the trained model inherits from the base model's card."""
_IDENTIFYING = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Equal fields of config.json identify a local folder as a published model of the same name."""
_METHODS = {
    "rl": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "preference": "preference optimisation",
    "reward_model": "pairwise comparison, as a reward model,",
    "distillation": "on-policy distillation",
}


@dataclass(frozen=True, slots=True)
class Result:
    """A measure of a model on a validation set, with its 95 % interval. None: it has no interval.

    `before` is the same measure before training. `sampling` is the number of attempts and the temperature, as text.
    """

    set_name: str
    measure: str
    value: float
    interval: tuple[float, float] | None = None
    before: float | None = None
    sampling: str = ""

    @property
    def interval_text(self) -> str:
        return "none" if self.interval is None else f"{self.interval[0]:.4g} to {self.interval[1]:.4g}"


def write_card(run: Path, model: Path, step: int, name: str | None = None) -> None:
    """Write README.md, the card of a run's model after a step, into the folder `model`.

    `name` is the model's name on the Hub; default: the run's name. Raises StorageError.
    """
    text = str(model_card(RunRecord.open(run), model, step, name))
    with raise_storage_errors(model / CARD):
        replace_text(model / CARD, text)


def model_card(run: RunRecord, model: Path, step: int, name: str | None = None) -> ModelCard:
    """Return the card of a run's model after a step. `model` is its folder, `name` its name on the Hub."""
    from huggingface_hub import ModelCard

    results = [*_results_of_step(run, step), *_results_of_evaluations(run, model)]
    metadata = _make_metadata(run, model, results, name or run.name)
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{_card_text(run, model, step, results, name, metadata)}")


def _results_of_step(run: RunRecord, step: int) -> Iterator[Result]:
    """Yield the measures of validation sets, with their values before training."""
    rows = dict(run.rows)
    row, row_before_training = rows.get(step, {}), rows.get(0, {}) if step else {}
    for name, value in row.items():
        if not math.isfinite(value):
            continue
        if f"{name}/low" in row and (match := _MEASURE.fullmatch(name)):
            set_name, measure = match.groups()
            interval = row[f"{name}/low"], row[f"{name}/high"]
            yield Result(set_name, measure, value, interval, row_before_training.get(name))
        elif name.startswith("val/") and name.endswith("/loss"):
            yield Result(name.split("/")[1], "loss", value, None, row_before_training.get(name))


def _results_of_evaluations(run: RunRecord, model: Path) -> Iterator[Result]:
    """Yield the measures of `megarl eval` in the run's folder for this model.

    Broken evaluations, and evaluations of earlier weights in the same folder, are left out.
    """
    exported_at = max((file.stat().st_mtime for file in model.glob("*.safetensors")), default=0.0)
    for folder in sorted((run.path / "evaluations").glob("*")):
        if not is_evaluation(folder) or folder.stat().st_mtime < exported_at:
            continue
        try:
            evaluation = read_evaluation(folder)
        except MegarlError:
            continue
        if not evaluation.model or Path(evaluation.model).resolve() != model.resolve():
            continue
        for set_name, measures in evaluation.measures.items():
            for name, measure in measures.items():
                yield _result_of(set_name, name, measure, evaluation.config)


def _result_of(set_name: str, name: str, measure: Measure, config: Mapping[str, Any]) -> Result:
    words = {"evaluation.samples_per_prompt": "attempts", "evaluation.sampling.temperature": "temperature"}
    sampling = ", ".join(f"{word} {config[field]}" for field, word in words.items() if config.get(field) is not None)
    return Result(set_name, name, measure.value, (measure.low, measure.high), None, sampling)


def _make_metadata(run: RunRecord, model: Path, results: Sequence[Result], name: str) -> ModelCardData:
    """Return the card's YAML header for the Hugging Face Hub."""
    from huggingface_hub import ModelCardData

    base_model, inherited_metadata = _find_base_model(run)
    sources = {field: hub_data_set(source) for field, source in _data_sources(run.config).items()}
    training_sets = dict.fromkeys(
        data_set for field, data_set in sources.items() if data_set and ".validation" not in field
    )
    tags = ("megarl", run.config.get("loop"), run.config.get("algorithm.preset"))
    return ModelCardData(
        base_model=base_model,
        datasets=list(training_sets) or None,
        library_name="transformers",
        pipeline_tag="text-classification" if _is_classifier(model) else "text-generation",
        tags=[str(tag).replace("_", "-") for tag in tags if tag],
        model_name=name if results else None,
        eval_results=[_eval_result(result, sources) for result in results] or None,
        **inherited_metadata,
    )


def _find_base_model(run: RunRecord) -> tuple[str | None, dict[str, Any]]:
    """Return the base model's name on the Hub (None: unknown), and the metadata of its card."""
    from huggingface_hub import ModelCard

    path = str(run.config.get("model.path", ""))
    folder = Path(find_folder(path))
    # The card may come with a downloaded folder, so expect any damage.
    try:
        base_metadata = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        base_metadata = {}
    inherited_metadata = {name: base_metadata[name] for name in _INHERITED if base_metadata.get(name)}
    if not Path(path).exists():
        return path if is_hub_name(path) and folder.is_dir() else None, inherited_metadata
    # An earlier run's model has no name on the Hub, so name its own base model.
    base_of_earlier_run = base_metadata.get("base_model")
    if "megarl" in (base_metadata.get("tags") or ()) and isinstance(base_of_earlier_run, str):
        return base_of_earlier_run, inherited_metadata
    return _recognise_published(folder), inherited_metadata


def _recognise_published(folder: Path) -> str | None:
    """Return the Hub's name of a local copy of a published model. None: another folder."""
    if (name := published_name(folder)) is None:
        return None
    try:
        config = read_object(folder / "config.json")
    except DataError:
        return None
    return name if all(config.get(field) == PUBLISHED[name].get(field) for field in _IDENTIFYING) else None


def _data_sources(config: Mapping[str, Any]) -> dict[str, str]:
    values = {match[1]: value for field, value in config.items() if (match := _DATA_FIELD.fullmatch(field))}
    return {field: value for field, value in values.items() if isinstance(value, str)}


def _eval_result(result: Result, sources: Mapping[str, str | None]) -> EvalResult:
    """Return a result as an entry of the metadata. `sources` has the data sets' names on the Hub by field."""
    from huggingface_hub import EvalResult

    name = result.set_name.partition("/")[0]
    hub_name = next((data_set for field, data_set in sources.items() if data_set and field.endswith(f".{name}")), None)
    text = f"{result.measure} (95 % interval {result.interval_text})" if result.interval else result.measure
    bounds = {} if result.interval is None else dict(zip(("low", "high"), result.interval, strict=True))
    return EvalResult(
        task_type="text-generation",
        dataset_type=hub_name or "local",
        # The metadata group results by type and configuration, not by name.
        dataset_config=", ".join(filter(None, (result.set_name, result.sampling))),
        dataset_name=result.set_name,
        metric_type=result.measure,
        metric_name=text,
        metric_value=result.value,
        metric_args={"confidence": 0.95, **bounds} if bounds else None,
    )


def _card_text(
    run: RunRecord, model: Path, step: int, results: Sequence[Result], name: str | None, metadata: ModelCardData
) -> str:
    """Return the card's text, which follows its metadata."""
    local_model = Path(str(run.config.get("model.path", ""))).name
    base_name = metadata.base_model or (f"the local model {local_model}" if local_model else "an unknown model")
    method_name = _METHODS.get(str(run.config.get("loop")), "an unknown method")
    sources = ", ".join(f"`{source}`" for field, source in _data_sources(run.config).items() if ".val" not in field)
    recipe = _recipe_text(run.path)
    parts = [
        f"# {name or run.name}",
        f"{base_name}, trained for {step} steps by {method_name} with megarl on {sources or 'unknown data'}.",
        "## Use",
        _usage_code(name or str(model.name), is_classifier=_is_classifier(model)),
        "## Results",
        _results_text(results, step),
        "## Recipe",
        f"{_fence(recipe)}yaml\n{recipe.strip()}\n{_fence(recipe)}",
        "## Versions",
        _versions_text(run),
    ]
    return "\n\n".join(parts) + "\n"


def _usage_code(path_or_hub_name: str, *, is_classifier: bool) -> str:
    model_class = "AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM"
    code = (
        f"from transformers import {model_class}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{path_or_hub_name}")\n'
        f'model = {model_class}.from_pretrained("{path_or_hub_name}")'
    )
    return f"```python\n{code}\n```"


def _results_text(results: Sequence[Result], step: int) -> str:
    if not results:
        return f"This model, of step {step}, was not evaluated."
    rows = [
        [
            result.set_name.replace("|", "/"),
            result.measure + (f" ({result.sampling})" if result.sampling else ""),
            f"{result.value:.4g}",
            result.interval_text,
            "not measured" if result.before is None else f"{result.before:.4g}",
        ]
        for result in results
    ]
    head = ["set", "measure", "value", "95 % interval", "before training"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _versions_text(run: RunRecord) -> str:
    recorded_versions = (start.facts.get("versions") for start in reversed(run.starts))
    versions = next(filter(None, recorded_versions), None)
    if not isinstance(versions, Mapping):
        return "The run did not record them."
    return "\n".join(f"- {package} {version}" for package, version in versions.items())


def _recipe_text(run: Path) -> str:
    try:
        content = (run / "config.yaml").read_bytes()
        return "# The run's config.yaml is too large." if is_too_large(content) else content.decode()
    except (OSError, UnicodeDecodeError):
        return "# The run's config.yaml cannot be read."


def _fence(text: str) -> str:
    return "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))


def _is_classifier(model: Path) -> bool:
    try:
        names = read_object(model / "config.json").get("architectures")
    except DataError:
        return False
    return isinstance(names, list) and any("SequenceClassification" in str(name) for name in names)
