"""Model folders of a run (`megarl export`): the trained model or a checkpoint's, with a model card; upload to the Hub.

Everything is checked before the first file is written or sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.convert import Conversion, to_hf
from megarl.checkpoint.drafter_files import convert_drafter
from megarl.checkpoint.manifest import check_sizes
from megarl.config import Recipe
from megarl.config.recipe import load_of_run
from megarl.data.templates.turn_ends import export_files
from megarl.families.shape import read_model_shape
from megarl.files import hub
from megarl.files.model_folder import CARD, check_model_folder, find_folder, sibling_folder
from megarl.loops.saving.best_model import BEST, BestRecord
from megarl.report.model_card import write_card
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.types import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Exported:
    """A complete model folder of a run, with the step of its weights.

    `conversion` is set if it was made from a checkpoint. `drafter` is the folder of the drafter trained with the model,
    if any.
    """

    folder: Path
    step: int
    conversion: Conversion | None = None
    drafter: Path | None = None


def export(run: Path, *, step: int | None = None, is_best: bool = False, out: Path | None = None) -> Exported:
    """Return a run's model folder, with a new model card.

    By default it is the model of the run's end (`hf/`), with `is_best` that of the best evaluation (`hf_best/`). With
    `step`, this step's checkpoint is converted to `out`, by default to `hf_step_NNNNNN/` in the run's folder unless
    that exists. A trained drafter has a folder next to it, `drafter_step_NNNNNN/` or `OUT_drafter/`. Raises ConfigError
    or DataError for a missing or incomplete model.
    """
    run_record = RunRecord.open_of_this_version(run)
    exported = _find_exported(run_record, is_best=is_best) if step is None else _export_step(run_record, step, out)
    if problems := check_model_folder(exported.folder):
        raise DataError(f"{problems[0]}; or export a checkpoint: megarl export {run} --step N --out FOLDER")
    check_sizes(exported.folder)
    write_card(run, exported.folder, exported.step)
    return exported


def push(run: Path, exported: Exported, name: str, *, is_private: bool) -> hub.Pushed:
    """Upload a run's exported model to the Hub as `name`, in one commit. Its card gets this name."""
    write_card(run, exported.folder, exported.step, name)
    message = f"Model of the run {run.resolve().name} after step {exported.step}"
    return hub.push(exported.folder, name, message, is_private=is_private, without=(BEST,))


def _find_exported(run_record: RunRecord, *, is_best: bool) -> Exported:
    """Return the folder of a run's own export: of its best evaluation, or of its end.

    Raises ConfigError if there is none.
    """
    folder = run_record.path / ("hf_best" if is_best else "hf")
    if is_best and (best := BestRecord.read(folder)) is not None:
        return Exported(folder, best.step, drafter=_exported_drafter(folder))
    if not is_best and (folder / "config.json").is_file():
        # A resumed run does not replace the earlier model before its own end.
        if (state := run_record.state) != "done":
            remedy = "let it end" if state in ("starting", "running") else "resume it to its end"
            raise ConfigError(
                f"{run_record.path}: the state of the run is {state}, and it went on after it exported hf/; {remedy}, "
                "or export a checkpoint with --step N"
            )
        return Exported(folder, run_record.step, drafter=_exported_drafter(folder))
    steps = ", ".join(str(checkpoint_step(checkpoint)) for checkpoint in reversed(run_record.checkpoints))
    remedy = f"export a checkpoint with --step N; it has the steps {steps}" if steps else "let the run end first"
    reason = "has no model of a best evaluation (hf_best)" if is_best else "has no exported model (hf)"
    raise ConfigError(f"{run_record.path}: the run {reason}; {remedy}")


def _export_step(run_record: RunRecord, step: int, out: Path | None) -> Exported:
    """Return the model of a run's checkpoint, converted unless its default folder exists."""
    folder = out or run_record.path / f"hf_step_{step:06d}"
    # Look for the folder first: the run may have exported this step itself and removed its checkpoint.
    if out is None and (folder / "config.json").is_file():
        return Exported(folder, step, drafter=_exported_drafter(folder))
    checkpoint = run_record.checkpoint(step)
    recipe = load_of_run(run_record.path)
    _refuse_unconvertible(run_record.path, recipe)
    drafter = sibling_folder(folder, "drafter") if recipe.trains_drafter else None
    # The model's folder comes last: if it exists, both are complete.
    if drafter is not None and recipe.drafter is not None and not (out is None and drafter.is_dir()):
        policy = read_model_shape(recipe.model.folder, recipe.model.override_config)
        convert_drafter(checkpoint, drafter, find_folder(recipe.drafter), policy)
    conversion = to_hf(
        checkpoint,
        folder,
        hf=Path(recipe.model.folder),
        override=recipe.model.override_config,
        # The base model's card describes another model; `write_card` writes this model's.
        other_texts={CARD: None, **export_files(recipe.model)},
    )
    return Exported(folder, step, conversion, drafter)


def _exported_drafter(folder: Path) -> Path | None:
    drafter = sibling_folder(folder, "drafter")
    return drafter if drafter.is_dir() else None


def _refuse_unconvertible(run: Path, recipe: Recipe) -> None:
    """Raise ConfigError for a run whose checkpoints lack a whole language model."""
    if recipe.lora.rank:
        reason = f"lora.rank = {recipe.lora.rank}: checkpoints have only the adapters"
    elif recipe.loop == "reward_model":
        reason = "loop = reward_model: checkpoints of reward models cannot be converted"
    else:
        return
    raise ConfigError(
        f"{run}: {reason}. Set checkpoint.export_every_steps, so that the run exports intermediate models. Its "
        "last model is exported to hf/ when it ends"
    )
