"""A model folder in an engine without a trainer, for evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config import RolloutConfig
from megarl.families.model_tensors import list_copied_prefixes
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import read_object, weight_files
from megarl.groups import world
from megarl.tracking.run_record import checkpoint_step, newest_checkpoint
from megarl.types import DataError, Request


class EngineRank:
    """Rank process with one vLLM engine and no trainer. With `dtype` None the model folder names the weights' type."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        folder: str,
        config: RolloutConfig,
        context_tokens: int,
        dtype: str | None = None,
        seed: int = 0,
        override: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the model folder's weights into an engine. `override` sets engine options of vLLM."""
        # Imported in the rank's process: the driver needs neither torch nor vLLM.
        from megarl.checkpoint.safetensors import check_folder
        from megarl.engine.engine import RolloutEngine
        from megarl.engine.parts.choice import EngineFeatures

        # Timeout in seconds of collectives between the engine's ranks.
        world.initialize(600.0)
        dtype = dtype or weights_dtype(Path(folder))
        self._engine = RolloutEngine(
            folder,
            config,
            max_model_len=context_tokens,
            dtype=dtype,
            seed=seed,
            override=override,
            features=EngineFeatures(),
        )
        check_folder(Path(folder), override)
        copied_prefixes = list_copied_prefixes(read_model_shape(folder, override))
        self._engine.load_tensors(_read_tensors(Path(folder), copied_prefixes))
        self._engine.weights_updated()

    def advance(
        self, work: tuple[tuple[Request, ...], tuple[str, ...]], budget_seconds: float, leave_after: int | None
    ) -> list[Any]:
        """Sample for `budget_seconds`, or until `leave_after` completions, and return the finished completions.

        `work` is (new requests, ids of requests to abort).
        """
        return self._engine.advance(*work, budget_seconds, leave_after=leave_after)


def model_folder(path: Path, *, is_best: bool = False) -> Path:
    """Return the folder of a run's exported model, or `path` if it is a model folder itself.

    `is_best`: return the model of the run's best evaluation. Raises DataError without a model or without weights.
    """
    is_run = (path / "config.yaml").is_file()
    folder = path / ("hf_best" if is_best else "hf") if is_run else path
    if is_best and not (is_run and (folder / "config.json").is_file()):
        raise DataError(
            f"{path}: has no model of a best evaluation (folder hf_best); give a run that set checkpoint.best"
        )
    if not (folder / "config.json").is_file():
        hint = "give one of the two"
        if (path / "hf_best").is_dir():
            hint = "it has the model of its best evaluation, hf_best (megarl eval --best)"
        elif (checkpoint := newest_checkpoint(path)) is not None:
            run, step = checkpoint.parents[1], checkpoint_step(checkpoint)
            hint = f"make a model of the checkpoint: megarl export {run} --step {step}"
        raise DataError(f"{path}: is neither a model folder nor a run that has exported its model; {hint}")
    weight_files(folder)
    return folder


def weights_dtype(folder: Path) -> str:
    return str(read_object(folder / "config.json").get("dtype", "bfloat16"))


def _read_tensors(folder: Path, copied_prefixes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model folder by name. Each is read from disk when it is yielded.

    Tensors with a prefix in `copied_prefixes`, such as a vision tower's, are skipped: the engine has no such part.
    """
    from safetensors import safe_open

    for file_name in weight_files(folder):
        with safe_open(folder / file_name, "pt") as file:
            for tensor_name in file.keys():  # noqa: SIM118 (no mapping)
                if not tensor_name.startswith(copied_prefixes):
                    yield tensor_name, file.get_tensor(tensor_name)
