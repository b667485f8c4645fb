"""Recipe section `data`: data sets with the names of their records' fields, prompts, and the curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Decides, Foreign, OnlyIf
from megarl.config.conditions import CURRICULUM, ENGINE, ON_POLICY, PTX_COEFFICIENT, RL, SFT
from megarl.config.section import Section

Format = Literal["colossalrl", "rl2", "verl", "trl", "slime", "openrlhf", "alpaca"]
"""Formats of records, named after the writing program (`megarl.data.formats`)."""
Role = Literal["prompt", "answer", "input", "response", "chosen", "rejected", "label", "tools"]
"""Roles of a record's fields (`megarl.data.formats.RecordFormat`)."""

# A union of str and DataSetConfig would report both branches for one mistake; this is one message.
_FORMS = "must be a path, or {path: ..., format: ..., fields: {ROLE: NAME, ...}, answer_field: ...}"


class DataSetConfig(Section):
    """Data set with its own field names. It ignores data.format, data.fields and data.answer_field."""

    path: str
    """Path of the data set, written like data.train."""
    format: Format | None = None
    """Format of this data set, see data.format."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """Names of this data set's fields, see data.fields."""
    answer_field: str | None = None
    """Field of the gold answer, see data.answer_field."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self

    # Only given fields are written: a default written out would count as given and override `data` on reading.
    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        """Serialise as the path alone if nothing else is given, else as the given fields."""
        given = {name: value for name, value in dump(self).items() if name in self.model_fields_set}
        return given if self.has_own_names else self.path

    @property
    def has_own_names(self) -> bool:
        """Return whether any field name is given. A path alone uses the names in `data`."""
        return bool(self.model_fields_set - {"path"})


def refuse_two_answers(fields: Mapping[Role, str], answer_field: str | None) -> None:
    """Raise PydanticCustomError if two different names are given for the gold answer."""
    if answer_field is not None and fields.get("answer", answer_field) != answer_field:
        text = "fields.answer {} and answer_field {} both name the gold answer; remove one"
        raise PydanticCustomError("two_answers", text.format(fields["answer"], answer_field))  # pyright: ignore


def two_answers(values: Any, place: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the mappings with two different names for the gold answer, each with its dotted name.

    `values`: a recipe's plain values, not validated yet.
    """
    if not isinstance(values, Mapping):
        return []
    found = [pair for name, value in values.items() for pair in two_answers(value, f"{place}.{name}".lstrip("."))]
    fields, alone = values.get("fields"), values.get("answer_field")
    by_role = fields.get("answer") if isinstance(fields, Mapping) else None
    is_double = isinstance(by_role, str) and isinstance(alone, str) and by_role != alone
    return [(place, values), *found] if is_double else found


def path_of(data_set: str | DataSetConfig) -> str:
    """Return the path of a data set."""
    return data_set if isinstance(data_set, str) else data_set.path


def _of_forms(given: Any) -> Any:
    """Return a path unchanged and a mapping as DataSetConfig, so that errors name the mapping's own fields."""
    if isinstance(given, str | DataSetConfig) or given is None:
        return given
    if not isinstance(given, Mapping) or "path" not in given or given.keys() - DataSetConfig.model_fields.keys():
        raise PydanticCustomError("data_set", _FORMS)
    return DataSetConfig.model_validate(given)


DataSet = Annotated[str | DataSetConfig, BeforeValidator(_of_forms)]
OptionalDataSet = Annotated[str | DataSetConfig | None, BeforeValidator(_of_forms)]


def _path_alone(given: Any) -> Any:
    if isinstance(given, Mapping):
        text = "must be a path; the names of its fields are data.format, data.fields and data.answer_field"
        raise PydanticCustomError("training_data", text)
    return given


TrainingData = Annotated[str, BeforeValidator(_path_alone)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CurriculumConfig(Section):
    """Choice of problems by their solve rates."""

    band: tuple[Share, Share] | None = None
    """Solve rates, [lowest, highest], of the problems to train on. Untried problems are always drawn. Problems outside
    the band are mostly skipped. Default: every problem is drawn once per epoch. Metrics: curriculum/."""
    # Above 0, because a skipped problem could never return to the band as the policy changes.
    outside: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(CURRICULUM)] = 0.1
    """Probability of drawing a problem with an accuracy outside `band` when its turn comes, once per epoch."""
    memory: Annotated[float, Field(ge=0.0, lt=1.0), OnlyIf(CURRICULUM)] = 0.5
    """Weight of a problem's earlier solve rate against its newest group. 0: only the newest group counts."""
    by: Annotated[str | None, OnlyIf(CURRICULUM)] = None
    """Record field (a difficulty level, say) grouping problems: equal values share one solve rate. Default: one solve
    rate per problem."""

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.band is not None and self.band[0] > self.band[1]:
            raise PydanticCustomError("curriculum", "band: the lowest solve rate is above the highest; swap them")
        return self


class DataConfig(Section):
    # Records by loop: {"messages": {...} or [...]} with "gt_answer" (rl, distillation); with an assistant's turn, or
    # "prompt" and "response" (sft); "chosen" and "rejected" (preference, reward_model); "response" and "label" (kto).
    # data.format has the formats of other programs. SPLIT@ stands before a folder or name: train@data/gsm8k takes the
    # files of one split. `environment:COUNT` is for rl and distillation. Each such problem is a function of its number.
    """Training and validation data, their format, order and limits."""

    # "messages" is {...} or [...]. sft also takes "prompt" and "response", kto takes "response" and "label". A Hub data
    # set may be OWNER/NAME/FOLDER and comes from `hf download OWNER/NAME --repo-type dataset`. Example of a split:
    # train@data/gsm8k. `environment:COUNT` (rl, distillation): n problems made by rollout.environment, each a function
    # of its number.
    train: Annotated[TrainingData,
        Foreign("train_files dataset_name train_data_path train_data.path train_data dataset prompt_dataset",
            "data.path", example="data.jsonl", short="d", verl="data.train_files", slime="--prompt-data")]  # fmt: skip
    """Training data: a JSON-lines, JSON, CSV, Parquet or Arrow file, a folder of one kind, or OWNER/NAME in the Hub's
    cache; SPLIT@ before it takes one split. Or `environment:COUNT`. Records: "messages" with "gt_answer" (rl,
    distillation) or an assistant's turn (sft); "chosen" and "rejected" (preference, reward_model); or data.format's."""
    validation: Annotated[dict[Name, DataSet],
        Foreign("val_files eval_prompt_data eval_dataset val_data_path test_files test_data_path test_data",
            note="sources by name", example="data.validation.test=test@openai/gsm8k/main", short="ed",
            RL2="test_data.path", verl="data.val_files")] = Field(default_factory=dict)  # fmt: skip
    """Validation sets by name: paths as in data.train, or {path: ..., fields: ...} with own format, fields,
    answer_field. Problems, or pairs (preference, reward_model); `environment:COUNT` makes problems not used in
    training. Metric: val/NAME/accuracy."""
    validation_conversations: Annotated[dict[Name, DataSet], OnlyIf(SFT)] = Field(default_factory=dict)
    """Validation sets of conversations (sft) by name, written as in data.validation. Metric: val/NAME/loss, in nats per
    token."""
    ptx: Annotated[OptionalDataSet, OnlyIf(RL, PTX_COEFFICIENT),
        Foreign("pretrain_data", example="data.ptx=talk.jsonl algorithm.ptx_coefficient=0.1",
            ColossalChat="--ptx_dataset")] = None  # fmt: skip
    """Conversations for the supervised term of PPO-ptx (algorithm.ptx_coefficient), written as in data.validation."""
    format: Format | None = None
    """Training program for which the data was written. Its names of record fields are used (megarl.data.formats).
    Default: recognised from each source's first record and reported at the start. Reward functions get all fields in
    `record`."""
    fields: Annotated[dict[Role, str],
        Foreign("prompt_key", note="{prompt: NAME}", example="data.fields.prompt=prompt", verl="data.prompt_key",
            slime="--input-key")] = Field(default_factory=dict)  # fmt: skip
    """Your names of record fields, for example {prompt: question, answer: solution}; dots reach into objects. `input`
    is a text appended to the prompt after an empty line (alpaca). Used for every set without its own names."""
    answer_field: Annotated[str | None, OnlyIf(*ENGINE),
        Foreign("ground_truth_key", example="label", slime="--label-key")] = None  # fmt: skip
    """Field of the gold answer, short for fields.answer: text, a number, an object or a list; dots reach into objects.
    Default: the format's field, gt_answer in megarl's own."""
    system_prompt: Annotated[str | None,
        Foreign(remark="default: the reward's own; or a text", example="default", short="s",
            ColossalRL="--system-prompt")] = None  # fmt: skip
    """System message for conversations without one. `default`: the message needed by the first of reward.functions with
    a format (boxed, think_answer_tags, code). `none` (or no value): no message."""
    max_prompt_tokens: Annotated[PositiveInt, OnlyIf(*ENGINE), Decides(vllm="max_model_len"),
        Foreign("max_prompt_length prompt_max_len rollout_max_prompt_len max_input_seq_length", example="512",
            verl="data.max_prompt_length"),
        Foreign(remark="a longer prompt is refused or dropped, never cut", example="512", short="mpt",
            ColossalRL="--max-prompt-tokens")] = 1024  # fmt: skip
    """Limit of prompt tokens, chat template included. Prompts are never cut: see data.overlong."""
    overlong: Annotated[Literal["refuse", "drop"],
        Foreign("filter_overlong_prompts data.truncation", note="prompts are never cut", example="drop",
            verl="data.filter_overlong_prompts")] = "refuse"  # fmt: skip
    """Treatment of a prompt above data.max_prompt_tokens, or a conversation or pair above
    trainer.max_tokens_per_microbatch. refuse (default): an error naming its line. drop: left out before the run,
    reported at the start. Metric: data/dropped."""
    streaming: Annotated[bool, Foreign("dataset_streaming use_streaming_dataset")] = False
    """Keep training records on disk, for data larger than memory. They are read and checked once at the start, copied
    to an unnamed file in the run's folder, and tokenised when drawn. Order, shuffling, curricula and resume do not
    change."""
    shuffle: Annotated[bool,
        Foreign("shuffle_dataset", slime="--rollout-shuffle"),
        Foreign(example="false", verl="data.shuffle")] = True  # fmt: skip
    """Shuffle the records again in each epoch, by the run's seed. Default: true."""
    curriculum: Annotated[CurriculumConfig, OnlyIf(ON_POLICY)] = CurriculumConfig()
    """Choice of problems by their solve rates (rl, distillation)."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self
