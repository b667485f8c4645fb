"""Counts of the tokens sampled for agents' attempts, by what happened to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.rollout.journal.lines import read_count
from megarl.rollout.journal.tries import JournaledTry


@dataclass(slots=True)
class TokenAccount:
    """Numbers of sampled tokens of agents' attempts, by what happened to them.

    `trained` and `untrained` are by step. `untrained` tokens belong to trained attempts, but have no loss. `dropped`
    tokens belong to attempts without a step, `lost` tokens to replaced tries. `waiting` tokens are in flight, or wait
    for a step. An aborted call's tokens count with its try. `faults` are contradictions in the journal, a line each.

    `unreported_calls` counts calls with an unknown number of tokens, missing in all other numbers. They are in
    progress, or were when their driver was killed or their engine was lost.
    """

    sampled: int = 0
    trained: dict[int, int] = field(default_factory=dict)
    untrained: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    unreported_calls: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def num_trained(self) -> int:
        return sum(self.trained.values())

    @property
    def num_untrained(self) -> int:
        """Number of sampled tokens that no step trained, including those of dropped attempts."""
        return sum(self.untrained.values()) + self.dropped

    def add_try(self, agent_try: JournaledTry) -> None:
        """Add the try's tokens to the counts by outcome. `sampled` is counted with each answer."""
        if (step := agent_try.step) is not None:
            num_untrained = agent_try.num_sampled - agent_try.num_trained
            self.trained[step] = self.trained.get(step, 0) + agent_try.num_trained
            self.untrained[step] = self.untrained.get(step, 0) + num_untrained
        elif agent_try.dropped_step is not None:
            self.dropped += agent_try.num_sampled
        elif agent_try.is_replaced or agent_try.lost_step is not None:
            self.lost += agent_try.num_sampled
        else:
            self.waiting += agent_try.num_sampled

    def complete(self, tries: Collection[JournaledTry], *, num_under_way: int) -> TokenAccount:
        """Return this account with the tokens of `tries` and the calls under way. Contradictions become faults."""
        account = replace(
            self,
            trained=dict(self.trained),
            untrained=dict(self.untrained),
            unreported_calls=self.unreported_calls + num_under_way,
            faults=list(self.faults),
        )
        for agent_try in tries:
            account.add_try(agent_try)
        # The total is counted separately from its parts, so a difference shows an error in the records.
        total = account.num_trained + account.num_untrained + account.lost + account.waiting
        if total != account.sampled:
            account.faults.append(f"{account.sampled} tokens were sampled, but {total} are accounted for")
        return account

    def lose_steps(self, first_step: int) -> None:
        """Count the tokens of `first_step` and later steps as lost: a resume discards these steps' weights."""
        for step in [step for step in self.trained if step >= first_step]:
            self.lost += self.trained.pop(step) + self.untrained.pop(step)

    def totals(self, live_tries: Collection[JournaledTry]) -> dict[str, Any]:
        """Return the journal's record of this account. `live_tries` have records of their own: their tokens, which
        `sampled` includes, are left out.
        """
        steps = [[step, self.trained[step], self.untrained[step]] for step in self.trained]
        counts = {"dropped": self.dropped, "lost": self.lost, "unreported_calls": self.unreported_calls}
        num_live_tokens = sum(agent_try.num_sampled for agent_try in live_tries)
        return {"kind": "totals", **counts, "sampled": self.sampled - num_live_tokens, "steps": steps}

    def add_totals(self, record: Mapping[str, Any]) -> None:
        """Add the counts of tries that were left out when an earlier start rewrote the journal."""
        self.sampled += read_count(record["sampled"])
        self.dropped += read_count(record["dropped"])
        self.lost += read_count(record["lost"])
        # Earlier versions of megarl do not count these.
        self.unreported_calls += read_count(record.get("unreported_calls", 0))
        for step, num_trained, num_untrained in record["steps"]:
            self.trained[read_count(step)] = read_count(num_trained)
            self.untrained[step] = read_count(num_untrained)
