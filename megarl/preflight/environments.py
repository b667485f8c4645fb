"""Checks of a recipe's environment: its import, and whether the chat template can add messages after a model's turn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.config.sections.rollout import LOOPBACK
from megarl.data.chat import tokenizer_of
from megarl.data.dialogue import Dialogue
from megarl.data.kinds.problems import MADE
from megarl.data.templates.history import REFUSES, history_faults
from megarl.data.tools.schemas import check_tools
from megarl.datasets.environment_tools import environment_errors, environment_factory
from megarl.datasets.fields import data_paths, takes_problems
from megarl.preflight.agent_programs import command_faults
from megarl.preflight.registry import Cost, checks
from megarl.types import ConfigError, MegarlError

_RUN_KEYS = frozenset(
    (
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "TRACKIO_WRITE_TOKEN",
    )
)
"""Environment variables with API keys of trackers and of the Hugging Face Hub. Agent programs never receive them."""


@checks("rollout", Cost.FILES)
def check_environment(recipe: Recipe, *, has_model: bool) -> Iterator[str]:
    """Yield the errors of `rollout.environment`. `has_model`: the policy's tokenizer can be read."""
    if not recipe.has_engine:
        return
    name = recipe.rollout.environment
    if name == "command":
        tools: Sequence[Mapping[str, Any]] = ()
        yield from command_faults(recipe.rollout.agent)
        yield from _find_name_faults(recipe, None)
        yield from _find_variable_faults(recipe)
    else:
        try:
            tools = _check_and_list_tools(recipe)
        except MegarlError as error:
            yield str(error)
            return
    # A single turn needs no message after the completion, so any chat template works.
    if name == "single_turn" or not has_model:
        return
    dialogue = Dialogue(tokenizer_of(recipe.model), recipe.rollout.tool_parser)
    yield from _find_history_faults(recipe, dialogue)
    if tools:
        yield from _find_tool_faults(name, tools, dialogue)
        return
    try:
        # Render a user message after an empty turn. A template that cannot do this raises here, not during the run.
        dialogue.observation(np.zeros(0, np.int32), ({"role": "user", "content": "reply"},))
    except ValueError as error:
        yield (
            f"rollout.environment = {name!r}: {error}; give the model folder a chat template that can continue after "
            "an assistant's turn, or set rollout.environment=single_turn"
        )


def _find_history_faults(recipe: Recipe, dialogue: Dialogue) -> Iterator[str]:
    """Yield an error if rollout.history = refuse, and the chat template changes earlier turns."""
    rollout = recipe.rollout
    if rollout.history != "refuse" or rollout.turns_of_attempt == 1:
        return
    faults = history_faults(dialogue.tokenizer)
    if rewritten := "; ".join(f"{kind}: {fault}" for kind, fault in faults.items() if fault != REFUSES):
        yield (
            f"rollout.history = refuse: the chat template changes earlier turns ({rewritten}); give the model folder a "
            "template that only appends, or set rollout.history to append or render"
        )


def _check_and_list_tools(recipe: Recipe) -> Sequence[Mapping[str, Any]]:
    """Raise ConfigError if the environment cannot be used. Else return its tools before an attempt."""
    make_environment = environment_factory(recipe)
    with environment_errors(recipe):
        environment = make_environment()
        if not getattr(environment, "makes_problems", False):
            _refuse_made_problems(recipe)
        if check_machine := getattr(environment, "check", None):
            check_machine()
        tools = tuple(getattr(environment, "tools", ()))
    if getattr(environment, "runs_elsewhere", False) and recipe.rollout.endpoint.host in LOOPBACK:
        raise ConfigError(
            f"rollout.endpoint.host = {recipe.rollout.endpoint.host}: the agent runs in an environment of Harbor "
            "that cannot reach this address; set host to an address of this machine that it reaches (docker: "
            "172.17.0.1), and rollout.endpoint.token to ${oc.env:NAME}"
        )
    # An exception has one error, so the first one is reported.
    for fault in _find_name_faults(recipe, environment):
        raise ConfigError(fault)
    return tools


def _find_name_faults(recipe: Recipe, instance: object) -> Iterator[str]:
    """Yield an error if the algorithm needs states or roles, but the environment `instance` does not name them.

    `instance` None: an agent program, which names neither.
    """
    is_trained = recipe.trains_rewards and bool(recipe.train.steps)
    if recipe.algorithm.advantage == "rae" and is_trained and not getattr(instance, "names_roles", False):
        yield (
            f"algorithm.advantage = rae: rollout.environment = {recipe.rollout.environment} names no roles; return "
            "role in Start and set names_roles = True in your class, or set algorithm.advantage=grpo"
        )
    weight = recipe.algorithm.state_weight
    if weight and is_trained and not getattr(instance, "names_states", False):
        yield (
            f"algorithm.state_weight = {weight:g}: rollout.environment = {recipe.rollout.environment} names no states; "
            "choose one that does, such as guess_number, return state in Start and Step and set names_states = True in "
            "your class, or set algorithm.state_weight=0"
        )


def _refuse_made_problems(recipe: Recipe) -> None:
    for field, path in data_paths(recipe).items():
        if path.startswith(MADE) and takes_problems(recipe, field):
            raise ConfigError(f"{field} = {path}: this environment cannot generate problems; give a data file instead")


def _find_tool_faults(name: str, tools: Sequence[Mapping[str, Any]], dialogue: Dialogue) -> Iterator[str]:
    """Yield errors of the tools' JSON schemas, or of a chat template that cannot render tools, calls and replies."""
    try:
        check_tools(tools)
    except ValueError as error:
        yield f"rollout.environment = {name!r}: {error}"
        return
    question = ({"role": "user", "content": "."},)
    # Nine letters and digits: Mistral's chat templates reject call ids of another length.
    reply = {"role": "tool", "name": tools[0]["function"]["name"], "tool_call_id": "call00000", "content": "reply"}
    try:
        _ = dialogue.call_format
        dialogue.opening(question, tools)
        dialogue.observation(np.zeros(0, np.int32), (reply,), tools)
    except ConfigError as error:
        yield str(error)
    except ValueError as error:
        yield (
            f"rollout.environment = {name!r}: {error}; give the model folder a chat template that writes tools and "
            "their replies, or use an environment without tools"
        )


def _find_variable_faults(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each variable passed to agent programs that is missing, or holds a key of the run."""
    key_variables = (function.kwargs.get("api_key_env") for function in recipe.reward.functions)
    run_variables = {name for name in key_variables if isinstance(name, str)} | _RUN_KEYS
    for index, name in enumerate(recipe.rollout.agent.environment):
        assignment = f"rollout.agent.environment.{index} = {name}"
        # Variables named MEGARL_* configure the run itself.
        if name in run_variables or name.startswith("MEGARL_"):
            yield f"{assignment}: holds a key of the run's own, which an agent program must not see; leave it out"
        elif name not in os.environ:
            yield f"{assignment}: megarl's environment has no such variable; export it, or leave it out"
