"""Options of verl, TRL, slime, NeMo-RL, OpenRLHF, AReaL, prime-rl and ColossalRL, and the recipe fields for them.

The options are written at the recipe fields, as `Foreign` annotations. The error for an unknown recipe key names the
right field. `migration_page` lists all options by program.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from megarl.config.annotations import Foreign, ForeignValues
from megarl.config.effects import conditions
from megarl.config.formulas import formula_fields, formulas
from megarl.config.schema import all_fields, annotated_with, field_at, recipe_field
from megarl.files.nearest import nearest

if TYPE_CHECKING:
    from megarl.config import Recipe

WITHOUT_COUNTERPART = (
    Foreign("tokenizer_path tokenizer_name tokenizer_name_or_path",
            note="the tokenizer is the one in the folder model.path", ColossalChat="--tokenizer_dir"),
    Foreign("use_liger_kernel use_flash_attention_2 attn_implementation",
            note="Megatron-Core and vLLM choose their kernels; trainer.megatron and rollout.vllm change them",
            ColossalChat="--use_flash_attn"),
    Foreign("trust_remote_code", note="code of a model folder is never run; use a model without code"),
    Foreign("ref_model reference_model", note="the reference is the initial model, model.path"),
    Foreign("test_ratio", note="put held-out records into a separate file and name it in data.validation"),
    Foreign("disable_loss_mask", note="sft trains on the assistant's tokens alone"),
    Foreign(note="prompts of one forward batch change no update; trainer.max_tokens_per_microbatch limits a forward "
            "pass", short="tMbs", ColossalRL="--train-minibatch-size"),
    Foreign("use_dynamic_bsz use_dynamic_batch_size use_remove_padding packing packing_samples",
            "sequence_packing balance_batch balance_data padding_free",
            note="sequences are always packed and balanced, up to trainer.max_tokens_per_microbatch"),
    Foreign(note="groups that are filtered are always replaced", ColossalRL="dynamic_batching"),
    Foreign("teacher_model_server", note="teachers are on the run's ranks, with the policy", slime="--opd-type"),
    Foreign(note="loop: distillation learns on the policy's samples, loop: sft on those of a teacher",
            TRL="lmbda seq_kd"),
    Foreign("mixed_kl_weight", note="distillation.divergence jsd lies between the two KLs",
            NeMo_RL="loss_fn.mixed_kl_weight"),
    Foreign("vf_coef value_loss_coef", note="the critic has weights and an optimizer of its own"),
    Foreign("ref_tp", note="the reference has the trainer's parallel sizes"),
    Foreign("rollout.sampling.repetition_penalty rollout.sampling.frequency_penalty",
            "rollout.sampling.presence_penalty",
            note="the trainer could not repeat a distribution depending on earlier tokens; for evaluations use "
            "evaluation.sampling.repetition_penalty"),
    Foreign("producer_data_parallel_size",
            note="the number of engines follows from rollout.tp and the sampling ranks", short="pdp"),
    Foreign("rollout.name free_cache_engine vllm_enable_sleep enable_sleep_mode",
            note="vLLM samples; on ranks shared with the trainer it sleeps during training", short="b",
            ColossalRL="--backend", TRL="use_vllm"),
    Foreign(note="trainer.cp splits sequences in zigzag order", ColossalChat="--sp_mode"),
    Foreign("ddp_size fsdp_size", note="the data-parallel size is the ranks over trainer.tp, pp and cp",
            RL2="actor.ddp_size"),
    Foreign("overlap_param_gather",
            note="weights are gathered at the end of each update: the engine needs them before the next forward pass"),
    Foreign("zero_stage fsdp_config fsdp deepspeed strategy",
            note="Megatron-Core trains; see trainer.tp, trainer.pp and trainer.distributed_optimizer", short="zero",
            ColossalChat="--plugin"),
    Foreign("embedding_lora_dropout lora_train_bias lora_initialization_method",
            note="adapters are on lora.targets only, have no biases and are initialised as in LoRA's paper"),
    Foreign(note="the launcher chooses ports and folders", ColossalRL="--ray_dir --master_port"),
    Foreign("save_optimizer", note="a checkpoint always has the optimizer's state"),
    Foreign("resume_mode resume_from_checkpoint load_checkpoint load_ckpt_from optimizer_dir",
            note="a run goes on with: megarl train RECIPE --resume", short="cp", ColossalRL="--checkpoint-path",
            ColossalChat="--checkpoint_path", verl="trainer.resume_mode"),
    Foreign(note="samples of evaluations are in samples/ of the run's folder", short="esd",
            ColossalRL="--eval-save-dir"),
    Foreign("logging_steps", note="every step is logged"),
)  # fmt: skip
"""Options of other programs without a recipe field, each with the reason."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Options of other programs with one meaning, and the recipe fields for it."""

    foreign: Foreign
    fields: tuple[str, ...] = ()
    """Names of the recipe fields that replace the options, for example `train.samples_per_prompt`. Empty: megarl has no
    such field."""

    def __str__(self) -> str:
        """Return the end of an error message, for example `here it is train.samples_per_prompt`."""
        note = self.foreign.note or self.foreign.hint
        if not self.fields:
            return f"has no counterpart: {note}"
        return f"here it is {' and '.join(self.fields)}" + (f" ({note})" if note else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the foreign names for which an error suggests the recipe field. The field's own name is not among
        them."""
        own = _last(self.fields[0]) if self.fields else None
        options = (_plain(option) for options in self.foreign.options.values() for option in options)
        return tuple(dict.fromkeys((*self.foreign.names, *(name for name in options if _last(name) != own))))


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return all counterparts: one per meaning in the order of the recipe fields, then the options without a field."""
    found: dict[int, Counterpart] = {}
    for place in all_fields():
        for foreign in annotated_with(place, Foreign):
            field = f"{place}.{foreign.inside}" if foreign.inside else place
            # A section at several places has the same annotations there. The first place is meant.
            found.setdefault(id(foreign), Counterpart(foreign, (field, *foreign.also)))
    return (*found.values(), *map(Counterpart, WITHOUT_COUNTERPART))


@cache
def _by_name() -> dict[str, Counterpart]:
    return {name: entry for entry in counterparts() for name in entry.names}


def counterpart(name: str) -> Counterpart | None:
    """Return the recipe fields for another program's dotted option name, or None if it is unknown."""
    return next((_by_name()[tail] for tail in _tails(name) if tail in _by_name()), None)


def _tails(name: str) -> list[str]:
    """Return a dotted option name and its ends, longest first, as they are compared."""
    parts = _plain(name).split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


@dataclass(frozen=True, slots=True)
class OptionRow:
    """A row of MIGRATION.md: what an option of one program is in a recipe."""

    program: str
    option: str
    """The option as its program writes it, perhaps with a value: `--algo GRPO`."""
    overrides: tuple[str, ...]
    """Overrides of a recipe. Empty: megarl has no such field."""
    difference: str

    def __str__(self) -> str:
        """Return the end of an error message, for example `in ColossalChat it is train.steps (of a rollout)`."""
        fields = " and ".join(override.partition("=")[0] for override in self.overrides)
        meaning = f"it is {fields}" if fields else "it has no counterpart"
        return f"in {self.program} {meaning}" + (f" ({self.difference})" if self.difference else "")

    @property
    def name(self) -> str:
        return _plain(self.option.split()[0])

    @property
    def value(self) -> str:
        """Return the value of the option that the row is about. Empty: the row is about all values."""
        return self.option.partition(" ")[2]

    def agrees_with(self, entry: Counterpart | None) -> bool:
        """Return whether a counterpart names a field of this row, or both have none."""
        if entry is None:
            return False
        own = {override.partition("=")[0] for override in self.overrides}
        return (
            any(name == field or name.startswith(f"{field}.") for name in own for field in entry.fields)
            if own
            else not entry.fields
        )


_ROW = re.compile(r"\| `([^`]+)` \| (?:`([^`]+)`|—) \| (.*?) ?\|")


@cache
def option_rows() -> tuple[OptionRow, ...]:
    """Return all rows of MIGRATION.md, in its order."""
    rows, program = [], ""
    for line in migration_page().splitlines():
        if line.startswith("## "):
            program = line[3:].partition(":")[0]
        elif match := _ROW.fullmatch(line):
            option, overrides, difference = match.groups()
            rows.append(OptionRow(program, option, tuple((overrides or "").split()), difference))
    return tuple(rows)


def other_meanings(name: str, value: str | None, entry: Counterpart | None) -> list[OptionRow]:
    """Return the rows of programs in which an option means something else than its counterpart, one for each program.

    A row about this `value` of the option goes before one about all values.
    """
    tails = _tails(name)
    matched = next((tail for tail in tails if tail in _by_name()), tails[-1])
    # A shorter tail is another option than the counterpart's.
    names = tails[: tails.index(matched) + 1]
    rows = [row for row in option_rows() if row.name in names]
    found: dict[str, OptionRow] = {}
    for program in dict.fromkeys(row.program for row in rows):
        own = [row for row in rows if row.program == program]
        exact = [row for row in own if row.value and row.value == value]
        chosen = (exact or [row for row in own if not row.value] or own)[0]
        if not chosen.agrees_with(entry):
            found[program] = chosen
    return [*found.values()]


def short_counterpart(name: str) -> Counterpart | None:
    """Return the recipe fields for another program's short option, without its dash. Case matters: `tMbs` and `tmbs`
    differ."""
    return next((entry for entry in counterparts() if name in entry.foreign.short), None)


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def nearest_value(place: str, value: object) -> str | None:
    """Return the value that the user probably meant instead of an invalid one, or None."""
    if not isinstance(value, str):
        return None
    known = _choices(place)
    for item in annotated_with(recipe_field(place), ForeignValues):
        if (own := item.own_value.get(value.lower().replace("-", "_"))) in known:
            return own
    return nearest(value, known)


def _choices(place: str) -> list[str]:
    """Return the words that a field, or each item of a list field, accepts."""
    name = recipe_field(place)
    if name in formula_fields():
        return list(formulas(name))
    field = field_at(name) or field_at(name.rpartition(".")[0])
    return [] if field is None else list(_words(field.annotation))


def _words(kind: Any) -> Iterator[str]:
    for argument in get_args(kind):
        if get_origin(kind) is Literal:
            yield from [argument] if isinstance(argument, str) else []
        else:
            yield from _words(argument)


_BASE = {"name": "base", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
"""A recipe with all required fields."""


def written_override(field: str, value: str | None) -> str:
    """Return the override of a field with the value of another program's option, in megarl's spelling.

    Where the field takes no such value, the override has VALUE, and says what the field takes.
    """
    if value is None:
        return f"{field}=VALUE"
    if (fault := _value_fault(field, value)) is None:
        return f"{field}={value}"
    near = nearest_value(field, value)
    if near is not None and _value_fault(field, near) is None:
        return f"{field}={near}"
    return f"{field}=VALUE (the value {fault})"


def _value_fault(field: str, value: str) -> str | None:
    """Return why a field does not take a value that is written as an override's. None: it takes it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError
    from yaml import YAMLError

    from megarl.config import Recipe

    place = tuple(field.split("."))
    try:
        given = OmegaConf.to_container(OmegaConf.merge(_BASE, OmegaConf.from_dotlist([f"{field}={value}"])))
        Recipe.model_validate(given)
    except ValidationError as error:
        faults = [fault["msg"] for fault in error.errors(include_url=False) if fault["loc"][: len(place)] == place]
        return faults[0].replace("Input should be", "must be") if faults else None
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError):
        return "is not valid YAML"
    return None


def migration_page() -> str:
    """Return the text of launch/recipes/MIGRATION.md: `migration.md` with one table of options per program."""
    from megarl.config import Recipe

    base = Recipe.model_validate(_BASE)
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for entry in counterparts():
        for program, options in entry.foreign.options.items():
            recipe = f"`{_overrides(base, entry)}`" if entry.fields else "—"
            difference = entry.foreign.note or entry.foreign.remark
            rows[program] += [f"| `{option}` | {recipe} | {difference} |".replace("  ", " ") for option in options]
    page = Path(__file__).with_name("migration.md").read_text(encoding="utf-8")
    for program, lines in rows.items():
        page = page.replace(f"{{{program}}}", "\n".join(lines))
    return page


def _overrides(base: Recipe, entry: Counterpart) -> str:
    """Return the overrides that express an option: those under which the field has an effect, then the field's
    value."""
    field, example = entry.fields[0], entry.foreign.example
    if "=" in example:
        return example
    needed = " ".join(condition.example for condition in conditions(field) if not condition.holds(base)).split()
    value = f"{field}={example or _default(field)}"
    return " ".join((*(other for other in needed if not other.startswith(f"{field}=")), value))


def _default(field: str) -> str:
    """Return a field's default as YAML on one line, without blanks."""
    import yaml

    value = all_fields()[field].get_default(call_default_factory=True)
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip().replace(" ", "")
