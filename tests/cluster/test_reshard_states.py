"""The table of reshards: every transition, every pair it refuses, and the course of attempts."""

from __future__ import annotations

import pytest

from megarl.cluster.reshard_states import (
    MOST_ATTEMPTS,
    TRANSITIONS,
    Command,
    Event,
    ReshardStates,
    State,
    TransitionError,
)

IN_FLIGHT = {
    State.JOINING,
    State.SENDING,
    State.OVERLAPPING,
    State.OVERLAPPING_LOST_PEER,
    State.LOST_PEER,
    State.REJOINING,
}


def states(state: State = State.DISCONNECTED) -> ReshardStates:
    machine = ReshardStates()
    machine.state = state
    return machine


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_each_pair_of_state_and_event_is_in_the_table_or_refused(state: State, event: Event) -> None:
    machine = states(state)
    if (state, event) in TRANSITIONS:
        command = machine.handle(event)
        assert (machine.state, command) == TRANSITIONS[state, event]
    else:
        with pytest.raises(TransitionError, match=f"state {state.name} cannot handle {event.name}"):
            machine.handle(event)
        assert machine.state is state, "a refused event changes nothing"


def test_every_state_command_and_event_is_used() -> None:
    assert {state for state, _ in TRANSITIONS.values()} == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State), "no state is a dead end"
    assert {command for _, command in TRANSITIONS.values()} == set(Command)
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_every_state_is_reached_from_the_first_one_and_leads_back_to_idle() -> None:
    after = {state: {end for (begin, _), (end, _) in TRANSITIONS.items() if begin is state} for state in State}

    def reachable(start: State) -> set[State]:
        found, new = {start}, {start}
        while new := set().union(*(after[state] for state in new)) - found:
            found |= new
        return found

    assert reachable(State.DISCONNECTED) == set(State)
    assert all(State.IDLE in reachable(state) for state in State)


@pytest.mark.parametrize("state", State)
def test_a_lost_peer_and_an_error_are_expected_wherever_ranks_are_in_a_call(state: State) -> None:
    assert (state, Event.PEER_LOST) in TRANSITIONS
    assert ((state, Event.FAILED) in TRANSITIONS) == (state in IN_FLIGHT | {State.DISCONNECTED})


@pytest.mark.parametrize("state", State)
def test_a_transfer_starts_only_without_another_in_flight(state: State) -> None:
    """Reports not yet collected count as in flight, because the trainers may still be sending."""
    starts = (state, Event.START) in TRANSITIONS
    assert starts == (state in (State.DISCONNECTED, State.IDLE))
    assert ((state, Event.START_OVERLAPPING) in TRANSITIONS) == (state is State.IDLE), "copies need a connection"
    assert ((state, Event.REPLICA_ADDED) in TRANSITIONS) == starts


@pytest.mark.parametrize("pair", TRANSITIONS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_after_a_loss_the_old_group_is_never_used(pair: tuple[State, Event]) -> None:
    """Sending without joining starts in IDLE alone, and IDLE follows only an attempt without loss."""
    (begin, event), (end, command) = pair, TRANSITIONS[pair]
    if command in (Command.SEND, Command.SEND_COPIES):
        assert begin is State.IDLE
    if end is State.IDLE and begin is not State.IDLE:
        assert event in (Event.ANSWERED, Event.COLLECT)
        assert begin in (State.JOINING, State.SENDING, State.REJOINING, State.DELIVERED)
    if event in (Event.PEER_LOST, Event.PEER_MISSING, Event.REPLICA_ADDED, Event.FAILED):
        assert end is not State.IDLE


def test_attempts_are_counted_and_the_suspect_is_ended_before_the_last() -> None:
    machine = states()
    assert machine.handle(Event.START) is Command.JOIN
    for attempt in range(1, MOST_ATTEMPTS):
        assert machine.attempt == attempt
        assert machine.handle(Event.PEER_LOST) is Command.CANCEL_GROUP
        if attempt == MOST_ATTEMPTS - 1:
            assert machine.end_attempt(has_suspect=True) is Command.END_SUSPECT
            machine.handle(Event.PEER_LOST)
        assert machine.end_attempt() is Command.JOIN and machine.state is State.REJOINING
    machine.handle(Event.PEER_LOST)
    assert machine.end_attempt(has_suspect=True) is Command.GIVE_UP
    assert machine.handle(Event.START) is Command.JOIN and machine.attempt == 1


def test_a_transfer_over_an_existing_group_counts_as_an_attempt_and_one_of_copies_does_not() -> None:
    sent, copied = states(State.IDLE), states(State.IDLE)
    assert sent.handle(Event.START) is Command.SEND and sent.attempt == 1
    assert copied.handle(Event.START_OVERLAPPING) is Command.SEND_COPIES and copied.attempt == 0
    copied.handle(Event.PEER_LOST)
    assert copied.end_attempt() is Command.COLLECT_REPORTS
    assert copied.end_attempt() is Command.JOIN and copied.attempt == 1


def test_copies_without_a_loss() -> None:
    machine = states(State.IDLE)
    machine.handle(Event.START_OVERLAPPING)
    assert machine.end_attempt() is Command.NOTHING and machine.state is State.DELIVERED
    assert machine.handle(Event.COLLECT) is Command.COLLECT_REPORTS and machine.state is State.IDLE
    assert machine.handle(Event.COLLECT) is Command.NOTHING
