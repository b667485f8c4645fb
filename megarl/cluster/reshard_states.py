"""State machine of reshards to separate engines. `reshard_calls` reports events and executes its commands."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

MOST_ATTEMPTS = 3
"""Maximum attempts at one reshard before the run fails."""


class State(Enum):
    """State of a reshard. The cross-world group connects trainers and engines."""

    DISCONNECTED = "no usable cross-world group"
    IDLE = "connected, no reshard in flight"
    JOINING = "the ranks create a cross-world group, which also sends the weights"
    SENDING = "weights are sent while the trainers wait"
    OVERLAPPING = "copies of the weights are sent while the trainers execute other calls"
    DELIVERED = "after overlapping: the engines have the weights, the trainers' reports are outstanding"
    DELIVERED_LOST_PEER = "as delivered, but the cross-world group is not usable any more"
    LOST_PEER = "a rank was lost during an attempt, the other ranks are still to answer"
    OVERLAPPING_LOST_PEER = "a rank was lost while copies were sent"
    REJOINING = "after a loss: the remaining ranks create a new cross-world group"


class Event(Enum):
    """An event on the ranks, or a request of the training loop."""

    START = "a reshard is requested; the trainers wait for it"
    START_OVERLAPPING = "a reshard of copies is requested"
    ANSWERED = "all remaining ranks have answered the calls of an attempt"
    SUSPECTED = "as answered, but the last attempt is next and one engine always left first"
    EXHAUSTED = "as answered, and no attempt is left"
    PEER_LOST = "a replica ended, or a rank reported that it left the cross-world group"
    PEER_MISSING = "a rank reported ranks that did not join the cross-world group in time"
    FAILED = "a call raised an error that ends the run"
    REPLICA_ADDED = "a restarted replica takes part from now on"
    COLLECT = "the trainers' reports are requested"


class Command(Enum):
    """An action of the driver after a change of state."""

    NOTHING = "nothing"
    JOIN = "let all ranks create a cross-world group and send the weights"
    SEND = "send the weights over the existing group"
    SEND_COPIES = "send copies of the weights over the existing group"
    CANCEL_GROUP = "cancel the cross-world group on all ranks, unless it is cancelled already"
    COLLECT_REPORTS = "fetch the trainers' reports"
    END_SUSPECT = "end the engine that left first"
    GIVE_UP = "raise PeerLostError"


TRANSITIONS: Mapping[tuple[State, Event], tuple[State, Command]] = {
    (State.DISCONNECTED, Event.START): (State.JOINING, Command.JOIN),
    (State.DISCONNECTED, Event.REPLICA_ADDED): (State.DISCONNECTED, Command.NOTHING),
    (State.DISCONNECTED, Event.COLLECT): (State.DISCONNECTED, Command.NOTHING),
    # After a failure, the calls of other groups may still be in progress and report their losses late.
    (State.DISCONNECTED, Event.PEER_LOST): (State.DISCONNECTED, Command.NOTHING),
    (State.DISCONNECTED, Event.PEER_MISSING): (State.DISCONNECTED, Command.NOTHING),
    (State.DISCONNECTED, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.IDLE, Event.START): (State.SENDING, Command.SEND),
    (State.IDLE, Event.START_OVERLAPPING): (State.OVERLAPPING, Command.SEND_COPIES),
    (State.IDLE, Event.REPLICA_ADDED): (State.DISCONNECTED, Command.NOTHING),
    (State.IDLE, Event.COLLECT): (State.IDLE, Command.NOTHING),
    (State.IDLE, Event.PEER_LOST): (State.DISCONNECTED, Command.CANCEL_GROUP),
    (State.JOINING, Event.ANSWERED): (State.IDLE, Command.NOTHING),
    (State.JOINING, Event.PEER_LOST): (State.LOST_PEER, Command.CANCEL_GROUP),
    # All other ranks wait for a missing rank with the same deadline and report it themselves: nothing to cancel.
    (State.JOINING, Event.PEER_MISSING): (State.LOST_PEER, Command.NOTHING),
    (State.JOINING, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.SENDING, Event.ANSWERED): (State.IDLE, Command.NOTHING),
    (State.SENDING, Event.PEER_LOST): (State.LOST_PEER, Command.CANCEL_GROUP),
    (State.SENDING, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.OVERLAPPING, Event.ANSWERED): (State.DELIVERED, Command.NOTHING),
    (State.OVERLAPPING, Event.PEER_LOST): (State.OVERLAPPING_LOST_PEER, Command.CANCEL_GROUP),
    (State.OVERLAPPING, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.DELIVERED, Event.COLLECT): (State.IDLE, Command.COLLECT_REPORTS),
    (State.DELIVERED, Event.PEER_LOST): (State.DELIVERED_LOST_PEER, Command.CANCEL_GROUP),
    (State.DELIVERED_LOST_PEER, Event.COLLECT): (State.DISCONNECTED, Command.COLLECT_REPORTS),
    (State.DELIVERED_LOST_PEER, Event.PEER_LOST): (State.DELIVERED_LOST_PEER, Command.NOTHING),
    # The trainers must end their sending before they can join another group.
    (State.OVERLAPPING_LOST_PEER, Event.ANSWERED): (State.LOST_PEER, Command.COLLECT_REPORTS),
    (State.OVERLAPPING_LOST_PEER, Event.PEER_LOST): (State.OVERLAPPING_LOST_PEER, Command.NOTHING),
    (State.OVERLAPPING_LOST_PEER, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.LOST_PEER, Event.ANSWERED): (State.REJOINING, Command.JOIN),
    (State.LOST_PEER, Event.SUSPECTED): (State.LOST_PEER, Command.END_SUSPECT),
    (State.LOST_PEER, Event.EXHAUSTED): (State.DISCONNECTED, Command.GIVE_UP),
    (State.LOST_PEER, Event.PEER_LOST): (State.LOST_PEER, Command.CANCEL_GROUP),
    (State.LOST_PEER, Event.PEER_MISSING): (State.LOST_PEER, Command.NOTHING),
    (State.LOST_PEER, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
    (State.REJOINING, Event.ANSWERED): (State.IDLE, Command.NOTHING),
    (State.REJOINING, Event.PEER_LOST): (State.LOST_PEER, Command.CANCEL_GROUP),
    (State.REJOINING, Event.PEER_MISSING): (State.LOST_PEER, Command.NOTHING),
    (State.REJOINING, Event.FAILED): (State.DISCONNECTED, Command.NOTHING),
}
"""Next state and command for each state and event. Any other pair is an error in megarl."""


class TransitionError(RuntimeError):
    """Raised for an event that the present state does not allow."""


class ReshardStates:
    """The state of a reshard, changed by events according to `TRANSITIONS`."""

    def __init__(self) -> None:
        self.state = State.DISCONNECTED
        self.attempt = 0
        """Attempts at the current reshard. An overlapping reshard counts only when it is repeated."""

    def handle(self, event: Event) -> Command:
        """Change the state, and return the caller's command. Raises TransitionError."""
        if (self.state, event) not in TRANSITIONS:
            raise TransitionError(f"a reshard in state {self.state.name} cannot handle {event.name}")
        self.state, command = TRANSITIONS[self.state, event]
        if event in (Event.START, Event.START_OVERLAPPING):
            self.attempt = 0
        if command in (Command.JOIN, Command.SEND):
            self.attempt += 1
        return command

    def end_attempt(self, *, has_suspect: bool = False) -> Command:
        """Handle the answers of all remaining ranks to an attempt, and return the next command.

        `has_suspect`: all replicas are alive, and the run can lose the replica that left first. It is most likely at
        fault, so it ends before the last attempt.
        """
        event = Event.ANSWERED
        if self.state is State.LOST_PEER and self.attempt == MOST_ATTEMPTS:
            event = Event.EXHAUSTED
        elif self.state is State.LOST_PEER and self.attempt == MOST_ATTEMPTS - 1 and has_suspect:
            event = Event.SUSPECTED
        return self.handle(event)
