"""Sources of a run's problems: data, reward processes, environments and agent programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megarl.cluster.agents.agent_link import AgentLink
from megarl.cluster.launchers.run_nodes import server_processes
from megarl.config import Recipe
from megarl.config.judges import find_recipe_judging
from megarl.config.mixture import SourceRecipe
from megarl.data.dialogue import Dialogue
from megarl.data.templates.history import history_faults, history_notice
from megarl.data.templates.turn_ends import added_turn_ends, turn_ends_notice
from megarl.datasets.reading import Dropped, collect_for, read_problems
from megarl.environments import environment_maker, is_agent, num_processes, with_sandbox
from megarl.environments.environment_pool import EnvironmentPool, process_settings
from megarl.environments.shared import close_shared
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import WorkerSettings, worker_settings
from megarl.rollout.accuracy import Answers, had_unjudged_answers, unjudged_text
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.rollout.source import Source, sampling_settings, with_stop_tokens
from megarl.serving.agent.agent_program import agent_program
from megarl.serving.agent.node_memory import RunMemory
from megarl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class SourceData(NamedTuple):
    """The problems of one source."""

    training: Sequence[Problem]
    """Training problems. Empty in loops that read their training data themselves."""
    validation: dict[str, Sequence[Problem]]
    """Validation sets by name."""


class Screen(Protocol):
    """Terminal for messages to the user. `Tracker` implements it."""

    def info(self, text: str) -> None: ...

    def notice(self, text: str) -> None: ...

    def notice_once(self, kind: str, text: str) -> None: ...


def read_data(
    recipe: Recipe, tokenizer: Tokenizer, dropped: Dropped, folder: Path, *, with_validation: bool = True
) -> dict[str, SourceData]:
    """Read each source's training problems, in on-policy loops, and its validation sets.

    Dropped problems are counted in `dropped`. On-disk records are indexed in `folder`.
    """
    data_of: dict[str, SourceData] = {}
    for source in recipe.sources:
        source_recipe: Recipe = source.recipe
        train: Sequence[Problem] = ()
        # Other loops read their training data themselves. Only their validation sets are sampled.
        if source_recipe.is_on_policy:
            train = read_problems(
                source_recipe,
                tokenizer,
                source_recipe.data.train,
                dropped,
                name=source.name,
                collect=collect_for(source_recipe, folder),
            )
        needs_heldout = source_recipe.has_engine and with_validation
        validation = read_heldout(source_recipe, tokenizer, dropped) if needs_heldout else {}
        data_of[source.name] = SourceData(train, validation)
    return data_of


def read_heldout(recipe: Recipe, tokenizer: Tokenizer, dropped: Dropped) -> dict[str, Sequence[Problem]]:
    """Read a source's validation sets by name, each up to evaluation.max_problems. `dropped` counts too long ones."""
    sets = recipe.data.validation.items()
    heldout = {name: read_problems(recipe, tokenizer, path, dropped, is_heldout=True) for name, path in sets}
    return {name: problems[: recipe.evaluation.max_problems] for name, problems in heldout.items()}


def start_rewards(
    recipe: Recipe, stack: AsyncExitStack, log_folder: Path, notice: Callable[[str], object]
) -> dict[str, RewardPool]:
    """Start each source's reward processes, closed with `stack`. Sources with equal settings share them."""
    started_pools: list[tuple[WorkerSettings, RewardPool]] = []
    pools: dict[str, RewardPool] = {}
    for source in recipe.sources:
        settings = worker_settings(source.recipe.reward, source.recipe.sandbox)
        pool = next((pool for pool_settings, pool in started_pools if pool_settings == settings), None)
        if pool is None:
            pool = RewardPool(
                settings,
                # Without engines nothing is scored, so no worker is needed.
                num_workers=source.recipe.reward.num_workers if recipe.has_engine else 0,
                log_folder=log_folder,
                # Log files of all pools are numbered consecutively in one folder.
                first_log=sum(len(pool_settings) for _, pool_settings in started_pools),
                notice=notice,
                make_server=server_processes(recipe.cluster),
            )
            stack.push_async_callback(pool.aclose)
            started_pools.append((settings, pool))
        pools[source.name] = pool
    return pools


def _start_environments(recipe: Recipe, stack: AsyncExitStack, log_folder: Path) -> dict[str, EnvironmentPool]:
    """Start each source's environment processes, closed with `stack`. Environments in the driver have none."""
    pools: dict[str, EnvironmentPool] = {}
    num_logs = 0
    for source in recipe.sources:
        rollout = source.recipe.rollout
        num_environment_processes = (
            num_processes(rollout.environment, rollout.environment_processes) if recipe.has_engine else 0
        )
        if num_environment_processes == 0:
            continue
        pools[source.name] = EnvironmentPool(
            process_settings(rollout.environment, _settings(source.recipe), rollout.environment_memory_gib),
            num_processes=num_environment_processes,
            log_folder=log_folder,
            first_log=num_logs,
            make_server=server_processes(recipe.cluster),
        )
        stack.callback(pools[source.name].close)
        num_logs += num_environment_processes
    return pools


def _settings(recipe: Recipe) -> Mapping[str, Any]:
    """Return the arguments of a source's environment, with the sandbox settings if it uses the sandbox."""
    rollout = recipe.rollout
    return with_sandbox(rollout.environment, rollout.environment_kwargs, recipe.sandbox.model_dump(mode="json"))


async def make_sources(
    recipe: Recipe,
    data: Mapping[str, SourceData],
    rewards: Mapping[str, RewardPool],
    pool: EnginePool,
    tokenizer: Tokenizer,
    stack: AsyncExitStack,
    log_folder: Path,
    screen: Screen,
    *,
    is_abandoned: Callable[[], bool] = lambda: False,
    earlier: Sequence[Mapping[str, Any]] = (),
    agents: Callable[[], Sequence[AgentLink]] = tuple,
) -> list[Source]:
    """Start the environments, closed with `stack`, and return the recipe's sources sampling with `pool`.

    Completions also end at the chat template's ends of turns. `earlier` are the metrics of earlier steps. `agents`
    returns the agents of the run's nodes, where containers may start.
    """
    folder = recipe.model.folder
    turn_ends = added_turn_ends(folder, tokenizer)
    if turn_ends:
        screen.info(turn_ends_notice(turn_ends, folder, tokenizer))
    stack.push_async_callback(close_shared)
    environments = _start_environments(recipe, stack, log_folder)
    # One for all sources, because containers of several sources run on the same nodes.
    memory = RunMemory()
    return [
        await make_source(
            replace(source, recipe=with_stop_tokens(source.recipe, turn_ends)),
            data[source.name],
            rewards[source.name],
            environments.get(source.name),
            pool,
            tokenizer,
            stack,
            is_abandoned,
            screen,
            had_unjudged_answers(earlier, source.name, data[source.name].validation, is_mixture=bool(recipe.mixture)),
            agents,
            memory,
        )
        for source in recipe.sources
    ]


async def make_source(
    source: SourceRecipe,
    data: SourceData,
    rewards: RewardPool,
    environments: EnvironmentPool | None,
    pool: EnginePool,
    tokenizer: Tokenizer,
    stack: AsyncExitStack,
    is_abandoned: Callable[[], bool],
    screen: Screen,
    had_unjudged_answers: bool = False,
    agents: Callable[[], Sequence[AgentLink]] = tuple,
    memory: RunMemory | None = None,
) -> Source:
    """Create a source that samples with these engines. An agent's endpoint is open until `stack` closes.

    `screen` gets its settings and the first failure of each kind. `had_unjudged_answers`: an earlier step already had
    an answer without a verdict, so accuracy is not measured (`rollout.accuracy`).
    """
    recipe = source.recipe
    rollout = recipe.rollout
    has_turns = rollout.turns_of_attempt > 1
    # Agents send their history themselves, so the template cannot change it unnoticed.
    if recipe.has_engine and has_turns and not is_agent(rollout.environment):
        screen.info(history_notice(history_faults(tokenizer), rollout.history))
    judges = find_recipe_judging(recipe)
    if recipe.has_engine and recipe.reward.functions and (text := unjudged_text(recipe, source.name)):
        screen.notice(text)
    sampling = sampling_settings(rollout.sampling)
    agent = await stack.enter_async_context(
        agent_program(recipe, pool, rewards.score, sampling, screen.notice, agents, memory)
    )
    if agent is not None:
        screen.info(f"endpoint at {agent.runner.endpoint.base_url}/v1")
    sampler = GroupSampler(
        pool=pool,
        dialogue=Dialogue(tokenizer, rollout.tool_parser),
        score=rewards.score,
        environment=source.name,
        make_environment=environment_maker(rollout.environment, _settings(recipe)) if agent is None else None,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_turns=rollout.turns_of_attempt,
        truncated_turn=rollout.truncated_turn,
        history="render" if rollout.history == "render" else "append",
        budget=rollout.budget,
        is_abandoned=is_abandoned,
        notify_once=screen.notice_once,
        agent=agent.attempt if agent is not None else None,
        expect_programs=agent.expect if agent is not None else None,
        environment_pool=environments,
        answers=Answers(judges, source.name, screen.notice_once, had_unjudged_answers),
    )
    return Source(source.name, source.weight, recipe, sampler, data.training, data.validation, rewards.metrics)
