"""Data fields of a recipe: paths, kinds of records, token limits, and the system message."""

from __future__ import annotations

from megarl.config import DataConfig, Recipe
from megarl.config.sections.data_sets import DataSet, DataSetConfig, path_of
from megarl.config.teacher_templates import RECORD
from megarl.data.formats import FieldNames
from megarl.data.kinds import KindName
from megarl.planner.sizes import row_multiple
from megarl.rewards import system_prompt_of
from megarl.types import ConfigError


def data_paths(recipe: Recipe) -> dict[str, str]:
    paths: dict[str, str] = {}
    for source in recipe.sources:
        sets = data_sets(source.recipe)
        paths |= {source.place(field): path_of(data_set) for field, data_set in sets.items()}
    return paths


def data_sets(recipe: Recipe) -> dict[str, DataSet]:
    """Return the data sets in the recipe of one source, by recipe field."""
    data = recipe.data
    sets: dict[str, DataSet] = {"data.train": data.train}
    sets |= {f"data.validation.{name}": data_set for name, data_set in data.validation.items()}
    sets |= {
        f"data.validation_conversations.{name}": conversations
        for name, conversations in data.validation_conversations.items()
    }
    return sets | ({"data.ptx": data.ptx} if data.ptx else {})


def kind_of_set(recipe: Recipe, field: str) -> KindName:
    """Return a data set's kind of examples: problems, conversations, pairs of answers, judged answers (kto)."""
    if recipe.loop in ("preference", "reward_model"):
        return "judged" if recipe.loop == "preference" and recipe.preference.loss == "kto" else "pairs"
    is_trained_text = field == "data.train" and recipe.loop == "sft"
    is_conversations = field == "data.ptx" or field.startswith("data.validation_conversations.")
    return "conversations" if is_trained_text or is_conversations else "problems"


def takes_problems(recipe: Recipe, field: str) -> bool:
    return kind_of_set(recipe, field) == "problems"


def field_names(recipe: Recipe, data_set: DataSet, field: str | None = None) -> FieldNames:
    """Return the names of a data set's record fields: its own, else those under `data`.

    `field`: the recipe field for errors; by default the first one with this data set.
    """
    has_own = isinstance(data_set, DataSetConfig) and data_set.has_own_names
    settings = data_set if has_own else recipe.data
    assert isinstance(settings, DataSetConfig | DataConfig)
    fields = {str(role): name for role, name in settings.fields.items()}
    return FieldNames(settings.format, fields, settings.answer_field, _fields_remedy(recipe, data_set, field, has_own))


def _fields_remedy(recipe: Recipe, data_set: DataSet, field: str | None, has_own: bool) -> str:
    """Return the command-line override that sets the record field names of a data set."""
    field = field or next(
        (field for field, candidate in data_sets(recipe).items() if candidate == data_set), "data.train"
    )
    own_override = f"'{field}={{path: {path_of(data_set)}, fields: {{}}}}'"
    if has_own:
        return own_override
    return "'data.fields={}'" if field == "data.train" else f"'data.fields={{}}', or for this set alone {own_override}"


def context_fields(recipe: Recipe) -> dict[str, str]:
    """Return the record fields in the teacher's prompts, each with the recipe field that names it."""
    if recipe.loop != "distillation" or recipe.distillation.teacher_prompt is None:
        return {}
    sources = [source for source in recipe.distillation.context if source.startswith(RECORD)]
    return {source.removeprefix(RECORD): "distillation.context" for source in sources}


def unread_context_fields(recipe: Recipe) -> dict[str, str]:
    """Return record fields that are the teacher's prompt in other programs, but not here, each with a remedy."""
    name = "teacher_prompt"  # The field's name in ms-swift.
    if recipe.loop != "distillation" or name in context_fields(recipe):
        return {}
    return {
        name: "give the text that only the teacher sees in another field, name it in distillation.context as "
        "record.NAME, and remove this one"
    }


def system_prompt(recipe: Recipe) -> str | None:
    """Return the system message for conversations without one, or None.

    Raises ConfigError for `data.system_prompt: default` if no reward function has a format instruction.
    """
    setting = recipe.data.system_prompt
    if setting in (None, "none"):
        return None
    if setting != "default":
        return setting
    # Only loops with an engine use reward functions, so only they have a default prompt.
    functions = recipe.reward.functions if recipe.has_engine else ()
    prompts = (system_prompt_of(function.name, function.kwargs) for function in functions)
    prompt = next((prompt for prompt in prompts if prompt is not None), None)
    if prompt is None:
        names = [function.name for function in functions]
        raise ConfigError(
            "data.system_prompt = default: would use the format instruction of a reward function, but "
            f"{', '.join(names) or 'this recipe'} has none; write the system message itself, or remove the field"
        )
    return prompt


def max_tokens(recipe: Recipe, kind: KindName) -> int:
    """Return the maximum tokens of a record: of a prompt, a conversation, or both answers of a pair together."""
    if kind == "problems":
        return recipe.data.max_prompt_tokens
    # A row is padded up to a multiple, so the longest sequence is the limit rounded down.
    multiple = row_multiple(recipe)
    longest_sequence = recipe.trainer.max_tokens_per_microbatch // multiple * multiple
    if kind == "conversations":
        return longest_sequence
    # Both answers of a pair share a row and are padded one by one. Padding may then take up to two multiples.
    longest_sequence -= 2 * multiple if multiple > 1 else 0
    # A scored answer has one more position.
    return longest_sequence - 2 if recipe.loop == "reward_model" else longest_sequence
