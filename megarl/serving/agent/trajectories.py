"""Trajectories of agents: recorded answers of a session become the calls that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.sections.rollout import AgentConfig
from megarl.environments import Message
from megarl.rewards.scoring.calling import Sample
from megarl.rollout.attempt import Task, empty_call, make_trajectory
from megarl.serving.agent.credit import select_trained_answers
from megarl.serving.answers import Answer
from megarl.serving.session import Session
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Ended, Problem, Trajectory

METRICS = (
    MetricRow("environment/forks", "count", "calls of an agent not continuing from the session's tokens", PER_ATTEMPT),
    MetricRow(
        "environment/abandoned_calls", "count", "calls of an agent aborted because its client went away", PER_ATTEMPT
    ),
    MetricRow(
        "environment/joined_retries", "count", "calls sent again by an agent before it had their answers", PER_ATTEMPT
    ),
    MetricRow(
        "environment/overridden_fields",
        "count",
        "fields of an agent's requests without effect, or replaced by the recipe's values",
        PER_ATTEMPT,
    ),
    MetricRow("environment/refused_calls", "count", "refused calls of an agent", PER_ATTEMPT),
    MetricRow(
        "environment/untrained_tokens",
        "tokens",
        "sampled tokens of an agent not trained on, aborted calls included",
        PER_ATTEMPT,
    ),
    MetricRow(
        "environment/unreported_calls",
        "count",
        "calls of an agent with unknown tokens, because their engine was lost or did not report an aborted call; "
        "untrained_tokens excludes these tokens",
        PER_ATTEMPT,
    ),
    MetricRow("environment/model_calls", "count", "completions of an agent", PER_ATTEMPT),
)

COUNTS = (
    "forks", "abandoned_calls", "joined_retries", "overridden_fields", "refused_calls", "untrained_tokens",
    "unreported_calls",
)  # fmt: skip
"""Names in `Session.counts` logged as metrics `environment/NAME`."""


def make_session_trajectory(
    task: Task,
    session: Session,
    failure: str | None,
    turn_rewards: tuple[tuple[int, float], ...],
    config: AgentConfig,
    metrics: Mapping[str, float],
    *,
    engine_seconds: float,
    environment_seconds: float,
) -> Trajectory:
    """Return the trajectory recorded by a session, without a reward."""
    answers = session.answers
    calls = [answer.call for answer in answers]
    ended: Ended = "done"
    if failure is not None:
        ended = "error"
    elif calls and calls[-1].completion.finish_reason == "length":
        ended = "length"
    trained_indices = select_trained_answers(answers, config.credit, config.untrained_kinds)
    session.counts["untrained_tokens"] += sum(
        answer.num_sampled_tokens for index, answer in enumerate(answers) if index not in trained_indices
    )
    counts = {name: float(session.counts[name]) for name in COUNTS}
    return make_trajectory(
        task,
        calls,
        [answer.completion_text for answer in answers],
        _list_new_messages(answers),
        ended=ended,
        failure=failure,
        is_in_thoughts=bool(answers) and answers[-1].is_in_thoughts,
        turn_rewards=turn_rewards,
        callers=tuple(answer.caller for answer in answers),
        trained=trained_indices,
        metrics=counts | {"model_calls": float(len(calls)), **metrics},
        engine_seconds=engine_seconds,
        environment_seconds=environment_seconds,
    )


def _list_new_messages(answers: Sequence[Answer]) -> list[Sequence[Message]]:
    """Return the new messages of each answer's prompt: without those of the earlier answer that it continues."""
    answers_by_number = {answer.number: answer for answer in answers}
    new_messages: list[Sequence[Message]] = []
    for answer in answers:
        continued_answer = None if answer.continued is None else answers_by_number.get(answer.continued)
        num_known = 0 if continued_answer is None else len(continued_answer.prompt_messages) + 1
        new_messages.append(answer.prompt_messages[num_known:])
    return new_messages


def make_sample(problem: Problem, session: Session) -> Sample:
    answers = session.answers
    if not answers:
        # The program made no call. Reward functions score an empty completion.
        empty_completion = empty_call(problem).completion
        return Sample.from_completion(
            problem, empty_completion, "", prompt_messages=problem.messages, turn=1, is_in_thoughts=False
        )
    last_answer = answers[-1]
    return Sample.from_completion(
        problem,
        last_answer.call.completion,
        last_answer.text,
        prompt_messages=last_answer.prompt_messages or problem.messages,
        turn=len(answers),
        is_in_thoughts=last_answer.is_in_thoughts,
    )
