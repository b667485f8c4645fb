"""Record fields that change the training in other programs, but not in megarl. A value in such a field is an error.

Fields that choose a record's reward function are errors if the recipe has another function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from megarl.data.formats import RecordFormat, value_at
from megarl.data.messages import is_blank, says_nothing
from megarl.data.tools.records import standard_tools
from megarl.data.tools.schemas import ToolSchema
from megarl.files.nearest import nearest
from megarl.files.strict_json import shown

_TEXT_ONLY = "megarl trains on text alone; remove the records with it, or the field if the prompts do without it"
_ONE_TEMPLATE = "set model.chat_template_kwargs in the recipe, for all records alike, and remove the field"
_BY_MESSAGE = 'give "weight": 0 at each message that is not to be trained, and remove the field'
_OWN_TOKENS = "megarl encodes the record's texts itself; remove the field"
_NO_WEIGHTS = "records have no weights of their own; remove the field, or the record for a weight of 0"
_AS_TOOLS = "give the tools in the field tools"
_WEIGHTS = ("weight", "loss_weight", "sample_weight", "loss_multiplier", "trainable")
"""Names of a record's weight."""
_SWITCHES = ("loss", "train", "training")
"""Names of a switch whether a record is trained. Only false is one: other values are notes, such as a measured loss."""
_REMEDIES = {
    **dict.fromkeys(
        ("image", "images", "image_url", "image_urls", "image_path", "image_paths", "rejected_images", "video",
         "videos", "video_path", "rejected_videos", "audio", "audios", "audio_path", "ref_audios", "audio_codes",
         "rejected_audios", "pixel_values", "multi_modal_data", "multi_modal_inputs", "multimodal_inputs"),
        _TEXT_ONLY,
    ),
    **dict.fromkeys(
        ("chat_template_kwargs", "apply_chat_template_kwargs", "template_kwargs", "enable_thinking", "reasoning_effort",
         "chat_template", "documents", "add_generation_prompt", "continue_final_message"),
        _ONE_TEMPLATE,
    ),
    **dict.fromkeys(
        ("loss_mask", "response_mask", "completion_mask", "assistant_masks", "mask", "train_on_prompt",
         "train_on_inputs", "train_on_input", "mask_history", "loss_scale", "loss_weights", "train_mask",
         "token_weights", "train_on_turn", "loss_masks", "assistant_mask", "prompt_mask"),
        _BY_MESSAGE,
    ),
    **dict.fromkeys(
        ("input_ids", "prompt_input_ids", "completion_input_ids", "answer_input_ids", "chosen_input_ids",
         "rejected_input_ids", "input_ids_prompt", "input_ids_chosen", "input_ids_rejected"),
        _OWN_TOKENS,
    ),
    **dict.fromkeys((*_WEIGHTS, *_SWITCHES), _NO_WEIGHTS),
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps", "reference_rejected_logps",
         "reference_logps", "reference_KL_logps"),
        "the reference's log-probs are computed from model.path; remove the field",
    ),
    "functions": _AS_TOOLS,
    "rejected_tools": "both answers get the tools in the field tools; remove the field",
}  # fmt: skip
"""Remedies for a value in a field, keyed by the field's name in other programs."""
_GYM_REQUEST = "responses_create_params"
"""Object of NeMo Gym with a problem's prompt (`input`), tools and sampling settings, as in OpenAI's Responses API."""
_INNER_REMEDIES = {
    f"{_GYM_REQUEST}.instructions": f"set data.fields.system={_GYM_REQUEST}.instructions, or remove it",
    **dict.fromkeys(("objects.ref", "objects.bbox"), _TEXT_ONLY),
}
"""Remedies for a value in an inner field of NeMo Gym and ms-swift, by its dotted name."""
_TOOLS_ELSEWHERE = (
    "tool_defs", "oai_tools", "info.tool_defs", "info.oai_tools", "metadata.tools", f"{_GYM_REQUEST}.tools",
)  # fmt: skip
"""Fields of a record's tools in prime-rl, verifiers, slime and NeMo Gym."""
_NAMES_TOOLS = re.compile("tool|function", re.IGNORECASE)
_SAMPLING_FIELDS = (
    "sampling_params", "sampling_kwargs", "generation_kwargs", "stop_strings",
    *(f"{_GYM_REQUEST}.{name}" for name in ("temperature", "top_p", "max_output_tokens", "reasoning")),
)  # fmt: skip
"""Fields of a problem's own sampling settings. In records that are not sampled they only say how an answer was made."""
_SINGLE_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_new_tokens", "max_completion_tokens", "stop",
         "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "generation_config"),
    ),
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}  # fmt: skip
"""Values without effect of a problem's own sampling settings outside of an object. None: there is no such value."""
_MAX_TURNS = "max_turns"
ENVIRONMENT_FIELDS = (
    "agent_name", "tools_kwargs", "need_tools_kwargs", "interaction_kwargs", "env_class", "agent_ref", "env_config",
    "env_id", "environment", _MAX_TURNS,
)  # fmt: skip
"""Fields by which other programs choose a record's environment.

They are at the top or in `extra_info` in verl, SkyRL, NeMo Gym, open-instruct and TRL, in `info` in verifiers.
"""
REWARD_MODEL = "reward.model"
"""Name of a recipe's reward model among its rewards."""
_MODELS = ("judge", "remote", REWARD_MODEL)
"""Rewards that can score any record: a model, or the user's own server."""
_BOXED = ("boxed", "math_competition", "math_verify")
_MATHS = (*_BOXED, "think_answer_tags", "gsm8k")
_REWARDS_OF_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "reward_model.style": {"model": _MODELS},
    "reward_spec.method": {"reward_model": _MODELS},
    "data_source": {
        **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), ("code",)),
        **dict.fromkeys(
            (f"searchR1_{name}" for name in (
                "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"
            )),
            (),
        ),
    },
    "metadata.rm_type": {
        **dict.fromkeys(("math", "deepscaler", "boxed_math", "boxed_deepscaler"), _MATHS),
        **dict.fromkeys(("dapo", "boxed_dapo"), _BOXED),
        "gpqa": ("multiple_choice",),
        "remote_rm": _MODELS,
    },
    "dataset": {
        **dict.fromkeys(("gsm8k", "math", "strict_math"), _MATHS),
        **dict.fromkeys(("code", "code_stdio"), ("code",)),
        **dict.fromkeys(("general-quality", "general-quality_ref", "general-quality_rubric", "rubric"), _MODELS),
        **dict.fromkeys(
            ("ifeval", "ifeval_old", "flan", "string_f1", "string_matcher", "puzzle", "re_search_f1", "max_length",
             "up_to_max_length"),
            (),
        ),
    },
}  # fmt: skip
"""Rewards of megarl that score what another program's value of a field chooses, by field and value.

reward_model.style and data_source: verl. reward_spec.method: SkyRL. metadata.rm_type: slime, miles. dataset:
open-instruct.
"""
_NEEDS_GROUND_TRUTH = "dataset"
"""Field that also names the data's origin. It chooses a reward only in records with `ground_truth`."""
_ALL_VALUES = ("metadata.rm_type",)
"""Fields of which every value chooses a reward: an unlisted value is a reward that megarl does not have."""
_VERL_SINGLE_TURN = "single_turn_agent"


def describe_unread(name: str, value: Any, remedy: str) -> str:
    return f"'{name}' is {shown(value)}, which is not read; {remedy}"


def unread_field(fields: Mapping[str, Any], format: RecordFormat) -> str | None:
    """Return an error for the first unread field that would change the training, or None.

    Fields that the record's format reads are exempt.
    """
    for name in _REMEDIES.keys() & fields.keys():
        value = fields[name]
        if says_nothing(value) or name in format.names:
            continue
        # A weight of 1 is what every record has.
        if name in _WEIGHTS and isinstance(value, bool | int | float) and value == 1:
            continue
        if name in _SWITCHES and value is not False:
            continue
        return describe_unread(name, value, _REMEDIES[name])
    for name, remedy in _INNER_REMEDIES.items():
        if name not in format.names and not says_nothing(value := value_at(fields, name)):
            return describe_unread(name, value, remedy)
    return _misspelt_field(fields, format) or _unread_tools(fields, format)


def _misspelt_field(fields: Mapping[str, Any], format: RecordFormat) -> str | None:
    """Return an error for a misspelt field of a system message, of history or of tools, or None.

    Its name is similar to the expected one, and its value has the expected type.
    """
    expected_names = (*format.system, *format.history, *format.tools)
    for name, value in fields.items():
        similar_name = None if name in format.names else _find_similar_name(name, expected_names)
        if similar_name is None or says_nothing(value) or not says_nothing(value_at(fields, similar_name)):
            continue
        if similar_name in format.tools:
            has_expected_type = bool(_read_tools(value))
        else:
            has_expected_type = isinstance(value, list if similar_name in format.history else str)
        if has_expected_type:
            return describe_unread(name, value, f"rename it to '{similar_name}', or remove it")
    return None


@lru_cache(maxsize=1024)
def _find_similar_name(name: str, expected_names: tuple[str, ...]) -> str | None:
    """Return the expected name that is similar, or None. Much longer names have other meanings: `system_id`."""
    similar_name = nearest(name, expected_names)
    return similar_name if similar_name is not None and abs(len(similar_name) - len(name)) <= 1 else None


def _unread_tools(fields: Mapping[str, Any], format: RecordFormat) -> str | None:
    """Return an error for tools in a field of another program, or None. A record may repeat its own tools there."""
    # An empty list says that the record has no tools.
    values = [value_at(fields, name) for name in format.tools]
    if any(isinstance(value, list) or not is_blank(value) for value in values):
        return None
    # Tools next to a prompt in an inner object: `input.messages` and `input.tools` in OpenAI's preference data.
    inner_names = (f"{name.rpartition('.')[0]}.tools" for name in format.prompt if "." in name)
    # Other values under these names are notes, such as the names of tools.
    known_names = (name for name in (*_TOOLS_ELSEWHERE, *inner_names) if _read_tools(value_at(fields, name)))
    # Under any other name only schemas count as tools. Llama's calls have `parameters` too, and a list of names is a
    # note.
    names_with_schemas = (
        name
        for name in fields
        if name not in format.names
        and _NAMES_TOOLS.search(name)
        and any(_is_schema(tool["function"].get("parameters")) for tool in _read_tools(fields[name]))
    )
    name_with_tools = next(chain(known_names, names_with_schemas), None)
    if name_with_tools is None:
        return None
    return describe_unread(
        name_with_tools, value_at(fields, name_with_tools), f"{_AS_TOOLS}, or set data.fields.tools={name_with_tools}"
    )


def _is_schema(parameters: Any) -> bool:
    if not isinstance(parameters, Mapping):
        return False
    return parameters.get("type") == "object" or "properties" in parameters or "$ref" in parameters


def _read_tools(value: Any) -> tuple[ToolSchema, ...]:
    try:
        return standard_tools(value)
    except ValueError:
        return ()


def unread_problem_field(fields: Mapping[str, Any], environment: str, rewards: Collection[str] | None) -> str | None:
    """Return an error for the first field of a problem that the run would not read, or None.

    The field chooses an environment, sampling settings or another reward than the recipe's `rewards`. None: the rewards
    are not checked.
    """
    if (fault := _unread_environment_field(fields, environment)) is not None:
        return fault
    # A reward function of the user's own may read a single setting, such as a limit of tokens.
    has_users_reward = any(":" in reward for reward in rewards or ())
    for name in (*_SAMPLING_FIELDS, *(() if has_users_reward else _SINGLE_SETTINGS)):
        value = value_at(fields, name)
        is_without_effect = _is_empty(value) or value == _SINGLE_SETTINGS.get(name)
        if not is_without_effect and not _is_users_environment(environment):
            remedy = "set rollout.sampling in the recipe, for all records alike, and remove the field"
            return describe_unread(name, value, remedy)
    return None if rewards is None else _unread_reward_field(fields, environment, rewards)


def _is_empty(value: Any) -> bool:
    """Return whether a setting has no value. A line end is one: a text to stop at."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return all(map(_is_empty, value)) if isinstance(value, list) else value is None or value == ""


def _unread_reward_field(fields: Mapping[str, Any], environment: str, rewards: Collection[str]) -> str | None:
    """Return an error for the first field that chooses another reward than the recipe's `rewards`, or None.

    Rewards and environments of the user's own get the whole record, and may read any field.
    """
    if _is_users_environment(environment) or any(":" in reward for reward in rewards):
        return None
    for field_path, rewards_of_values in _REWARDS_OF_VALUES.items():
        if field_path == _NEEDS_GROUND_TRUTH and "ground_truth" not in fields:
            continue
        value = value_at(fields, field_path)
        chosen_rewards = value if isinstance(value, list) else [value]
        for name in (name for name in chosen_rewards if isinstance(name, str) and name.strip()):
            fitting_rewards = rewards_of_values.get(name.strip(), () if field_path in _ALL_VALUES else None)
            if fitting_rewards is None or not {*fitting_rewards, *_MODELS}.isdisjoint(rewards):
                continue
            remedy = f"set it to {' or '.join(fitting_rewards)}" if fitting_rewards else "give a function of your own"
            return (
                f"'{field_path}' is {shown(value)}: this record has another reward than reward.functions = "
                f"{', '.join(rewards) or 'none'}; {remedy}, or remove the field"
            )
    return None


def _is_users_environment(environment: str) -> bool:
    return ":" in environment or environment == "command"


def _unread_environment_field(fields: Mapping[str, Any], environment: str) -> str | None:
    """Return an error for the first environment field that `environment` does not read, or None.

    Environments and agents of the user's own get the whole record, and may read any field.
    """
    if _is_users_environment(environment):
        return None
    for name in ENVIRONMENT_FIELDS:
        for field_path in (name, f"extra_info.{name}", f"info.{name}"):
            value = value_at(fields, field_path)
            if says_nothing(value) or value is False or value == _VERL_SINGLE_TURN == f"{environment}_agent":
                continue
            if name == _MAX_TURNS and value == 1 and environment == "single_turn":
                continue
            # With a single turn rollout.max_turns is refused too.
            has_setting = name == _MAX_TURNS and environment != "single_turn"
            remedy = "set rollout.max_turns for all records alike, and " if has_setting else ""
            return (
                f"'{field_path}' is {shown(value)}, which rollout.environment = {environment} does not read; {remedy}"
                "remove the field, or set rollout.environment to an environment of your own, module:Class, which gets "
                "the record"
            )
    return None
