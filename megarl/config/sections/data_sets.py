"""Recipe section `data`: data sets with the names of their records' fields, prompts, and the curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Decides, OnlyIf
from megarl.config.conditions import CURRICULUM, ENGINE, ON_POLICY, PTX_COEFFICIENT, RL, SFT
from megarl.config.section import Section

Format = Literal["colossalrl", "rl2", "verl", "trl", "slime", "openrlhf", "alpaca"]
"""Names of record formats. Each is the format written by one training program (`megarl.data.formats`)."""
Role = Literal[
    "prompt", "answer", "input", "response", "chosen", "rejected", "label", "tools", "system", "history"
]  # fmt: skip
"""Parts of a record that a format can name, for example prompt and answer (`megarl.data.formats.RecordFormat`)."""

# One message: a union of str and DataSetConfig would report both branches for one mistake.
_FORMS = "must be a path, or {path: ..., format: ..., fields: {ROLE: NAME, ...}, answer_field: ...}"


class DataSetConfig(Section):
    """Data set with its own format and field names, instead of data.format, data.fields and data.answer_field."""

    path: str
    """Path of the validation set, written like data.train."""
    format: Format | None = None
    """Format of the records, see data.format."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """Names of the record fields, see data.fields."""
    answer_field: str | None = None
    """Record field with the gold answer, see data.answer_field."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self

    # Only set fields are written: a written default would count as set when read, and override `data`.
    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        values = {name: value for name, value in dump(self).items() if name in self.model_fields_set}
        return values if self.has_own_names else self.path

    @property
    def has_own_names(self) -> bool:
        """Whether fields besides the path are set, in place of data.format, data.fields and data.answer_field."""
        return bool(self.model_fields_set - {"path"})


def refuse_two_answers(fields: Mapping[Role, str], answer_field: str | None) -> None:
    """Raise PydanticCustomError if `fields.answer` and `answer_field` are both set and differ."""
    if answer_field is not None and fields.get("answer", answer_field) != answer_field:
        text = "fields.answer {} and answer_field {} both name the gold answer; remove one"
        raise PydanticCustomError("two_answers", text.format(fields["answer"], answer_field))  # pyright: ignore


def two_answers(values: Any, place: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Return all mappings inside `values` with different fields.answer and answer_field, each with its dotted name.

    `values` are the plain values of a recipe before validation.
    """
    if not isinstance(values, Mapping):
        return []
    inner_mappings = [
        pair for name, value in values.items() for pair in two_answers(value, f"{place}.{name}".lstrip("."))
    ]
    fields, answer_field = values.get("fields"), values.get("answer_field")
    role_field = fields.get("answer") if isinstance(fields, Mapping) else None
    is_double = isinstance(role_field, str) and isinstance(answer_field, str) and role_field != answer_field
    return [(place, values), *inner_mappings] if is_double else inner_mappings


def path_of(data_set: str | DataSetConfig) -> str:
    return data_set if isinstance(data_set, str) else data_set.path


def _read_data_set(value: Any) -> Any:
    """Read a mapping as a DataSetConfig here, so that errors name its fields. A path is unchanged."""
    if isinstance(value, str | DataSetConfig) or value is None:
        return value
    if not isinstance(value, Mapping) or "path" not in value or value.keys() - DataSetConfig.model_fields.keys():
        raise PydanticCustomError("data_set", _FORMS)
    return DataSetConfig.model_validate(value)


DataSet = Annotated[str | DataSetConfig, BeforeValidator(_read_data_set)]
OptionalDataSet = Annotated[str | DataSetConfig | None, BeforeValidator(_read_data_set)]


def _require_path(value: Any) -> Any:
    if isinstance(value, Mapping):
        text = "must be a path; the names of its fields are data.format, data.fields and data.answer_field"
        raise PydanticCustomError("training_data", text)
    return value


TrainingData = Annotated[str, BeforeValidator(_require_path)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CurriculumConfig(Section):
    """Choice of problems by their solve rates."""

    band: tuple[Share, Share] | None = None
    """Range of solve rates, [lowest, highest], of problems to train on. A solve rate is the share of correct
    completions. Problems outside the range are skipped, except for the share `outside`; untried ones are drawn.
    Default: no curriculum, every problem once per epoch. Metrics: curriculum/."""
    # At 0, a skipped problem could never return to the band when the policy changes.
    outside: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(CURRICULUM)] = 0.1
    """Probability of training on a problem outside `band`, each time that an epoch reaches it."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(CURRICULUM)] = 0.5
    """Weight of the old value in the running average of a problem's solve rate; the newest group has 1 minus this
    weight. 0: only the newest group counts."""
    by: Annotated[str | None, OnlyIf(CURRICULUM)] = None
    """Record field that groups problems, for example a difficulty level. Problems with equal values have one solve rate
    together. Default: one solve rate per problem."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.band is not None and self.band[0] > self.band[1]:
            raise PydanticCustomError("curriculum", "band: the lowest solve rate is above the highest; swap them")
        return self


class DataConfig(Section):
    """Training and validation data, their format, order and limits."""

    # Records by loop: {"messages": {...} or [...]} with "gt_answer" (rl, distillation); with an assistant's turn, or
    # "prompt" and "response" (sft); "chosen" and "rejected" (preference, reward_model); "response" and "label" (kto).
    # data.format has the formats of other programs. A Hub data set may be OWNER/NAME/FOLDER; `hf download OWNER/NAME
    # --repo-type dataset` fetches it. Example of a split: train@data/gsm8k. `environment:COUNT` (rl, distillation):
    # each problem is a function of its number.
    train: TrainingData
    """Training data: a file (JSON lines, JSON, CSV, Parquet, Arrow), a folder of one kind, or a Hub data set
    OWNER/NAME. SPLIT@ before it selects a split. environment:COUNT: problems made by rollout.environment. Records:
    "messages" with "gt_answer" (rl, distillation) or answers (sft); "chosen", "rejected" (preference, reward_model)."""
    validation: dict[Name, DataSet] = Field(default_factory=dict)
    """Validation sets: a mapping from name to a path as in data.train, or to {path, format, fields, answer_field}.
    Records are problems with gold answers; in the loops preference and reward_model they are pairs. The path
    environment:COUNT lets the environment make COUNT problems that are not trained. Metric: val/NAME/accuracy."""
    validation_conversations: Annotated[dict[Name, DataSet], OnlyIf(SFT)] = Field(default_factory=dict)
    """Validation sets of conversations for loop sft, written as in data.validation. Metric: val/NAME/loss, in nats per
    token."""
    ptx: Annotated[OptionalDataSet, OnlyIf(RL, PTX_COEFFICIENT)] = None
    """Conversations for the supervised loss term of PPO-ptx (algorithm.ptx_coefficient), written as in
    data.validation."""
    format: Format | None = None
    """Program for which the data was written, for example verl: it decides the names of record fields, listed in
    megarl/data/formats.py. Default: recognised from the first record of each source, and reported at the start."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """Your names of record fields, for example {prompt: question, answer: solution}. A dot selects a field of an inner
    object. The field `input` is appended to the prompt after an empty line (alpaca). Data sets with `fields` of their
    own ignore these."""
    answer_field: Annotated[str | None, OnlyIf(*ENGINE)] = None
    """Record field with the gold answer: text, a number, an object or a list. Short for fields.answer. A dot selects a
    field of an inner object. Default: as in data.format (megarl's own: gt_answer)."""
    system_prompt: str | None = None
    """System message (text) for conversations without one. Default: `none`, no message. `default`: the answer format of
    the first of reward.functions that needs one (boxed, think_answer_tags, code)."""
    max_prompt_tokens: Annotated[PositiveInt, OnlyIf(*ENGINE), Decides(vllm="max_model_len")] = 1024
    """Maximum number of tokens of a prompt, chat template included. Longer prompts are refused or dropped
    (data.overlong), never shortened."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """Action for a prompt above data.max_prompt_tokens, or a conversation or pair above
    trainer.max_tokens_per_microbatch. refuse (default): the run does not start; the error names the record's line.
    drop: leave the record out, and report it at the start. Metric: data/dropped."""
    streaming: bool = False
    """Keep training records on disk, for data sets larger than memory. Default: false. Records are checked at the
    start, copied to a temporary file in the run folder, and tokenised when drawn. Order, shuffling, curricula and
    resume stay the same."""
    shuffle: bool = True
    """Shuffle the records before each epoch, by the run's seed. Default: true."""
    curriculum: Annotated[CurriculumConfig, OnlyIf(ON_POLICY)] = CurriculumConfig()
    """Curriculum: choice of problems by their solve rates (loops rl, distillation)."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self
